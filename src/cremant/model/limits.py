# SPDX-License-Identifier: Apache-2.0
"""Every bound of the system, with its arithmetic. A bound that is not here does not exist."""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB

# --- rows and messages ---
#: One stream message. Kafka's default is 1 MiB; ours leaves room for wide JSON.
MESSAGE_BYTES_MAX = 8 * MIB
#: Arrays and objects inside each other in one message: far below what any decoder's stack holds (about 1,000).
MESSAGE_DEPTH_MAX = 200
#: Rows of one row block: 64 Ki rows of ~100 decoded bytes are ~6 MiB, one log append.
BLOCK_ROWS_MAX = 64 * 1024
#: A log record: a full block of rows at 1 KiB each.
RECORD_BYTES_MAX = 64 * MIB
#: One append: messages that become visible together. Two full records, or a produce body with its keys.
APPEND_BYTES_MAX = 2 * RECORD_BYTES_MAX
#: A full append of 100-byte messages.
APPEND_MESSAGES_MAX = 1024 * 1024
#: An index entry of the embedded log per this many bytes: finding an offset reads at most twice that much.
LOG_INDEX_EVERY_BYTES = 64 * KIB
#: How often a writer of a partition looks for files that retention drops.
LOG_RETENTION_CHECK_MS = 30_000
#: One body of `POST /topics/{topic}`.
PRODUCE_BODY_BYTES_MAX = 64 * MIB

# --- queries ---
QUERY_TEXT_CHARS_MAX = 1 * MIB
QUERY_TIMEOUT_MS = 10_000
#: Pinot's default for every query shape.
DEFAULT_LIMIT = 10
#: Queries a broker or server works on at once; more wait (bounded by their deadline), then are refused with 211.
QUERIES_RUNNING_MAX = 8
QUERIES_WAITING_MAX = 256
#: Expressions inside each other: DataFusion 55 bears some hundreds before it overflows its stack; its SQL parser
#: counts about two levels per one of ours (RECURSION_LIMIT in exec/engine.py).
QUERY_DEPTH_MAX = 50
#: Conditions and function calls of a query: 2,000 plan in about a second.
QUERY_CALLS_MAX = 2_000
#: DataFusion 55 evaluates CASE recursively: 500 branches work, 2,000 end the process.
QUERY_CASE_BRANCHES_MAX = 200
#: Plans and parsed texts a broker remembers: some ten KiB each, so ~10 MiB.
PLANS_CACHED_MAX = 1_000
#: Rows of one answer: 10 M rows of ~100 bytes JSON are ~1 GB; beyond that a query must aggregate or page.
ANSWER_ROWS_MAX = 10_000_000

# --- cluster ---
HEARTBEAT_MS = 500
#: Six heartbeats: a pause of garbage collection or a busy laptop must not look like a death.
INSTANCE_DEAD_AFTER_MS = 6 * HEARTBEAT_MS
VIEW_POLL_MS = 10_000
#: Renewed with each heartbeat of the pipeline; lapses after ten missed ones.
PIPELINE_LEASE_MS = 10 * HEARTBEAT_MS
#: A committer reports progress with its heartbeats; lapses after 30 s without any.
COMMIT_LEASE_MS = 30_000
#: Each time a commit is taken over, the next lease is twice as long, up to half an hour.
COMMIT_LEASE_MAX_MS = 30 * 60 * 1000
INTERNAL_REQUEST_TIMEOUT_MS = 5_000
TABLES_MAX = 1_000
PARTITIONS_MAX = 1_024

# --- pipeline ---
#: Rows of one epoch at the very most, whatever a table asks for: 10 M rows of ~100 bytes pass through as 160 blocks.
EPOCH_ROWS_MAX = 10_000_000
#: Samples per row block that go to the dead-letter topic: enough to see a pattern, little enough to never matter.
DEAD_LETTERS_PER_BLOCK_MAX = 16
#: An idle table says so this often; its freshness is at most this plus a poll of the server.
PIPELINE_IDLE_MS = 250
#: Five renewals per lease (PIPELINE_LEASE_MS): four may be lost.
PIPELINE_RENEW_MS = 1_000
#: How long a stop waits for the epoch in flight before it interrupts it (it is replayed then).
PIPELINE_STOP_MS = 5_000

# --- restarts (supervisors) ---
BACKOFF_FIRST_MS = 250
BACKOFF_MAX_MS = 30_000

# --- tails ---
#: Blocks below this many rows are merged in the background.
TAIL_MERGE_ROWS = 64 * 1024
#: Merged batches above this size leave the heap for a mapped file: the tail is bounded by disk, not memory.
TAIL_SPILL_BYTES = 32 * MIB
#: Undecided rows of one server on disk; past it the tail stops with a named state instead of filling the disk.
TAIL_DISK_BYTES_MAX = 8 * 1024 * MIB

# --- epoch log readers ---
#: Closed epochs that a reader or a start can go back to on a Reset: half an hour at two a second, ~200 bytes each.
EPOCHS_REMEMBERED = 4_096
#: Content hashes of unclosed blocks that a reader compares: more than any epoch has (64 Ki full blocks would be 4 G
#: rows); ~200 bytes each, so 13 MB at the very most.
UNCLOSED_BLOCKS_MAX = 64 * 1024
