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

# --- Kafka ---
#: Questions about topics and offsets, and reads of data that must be there: two attempts and some.
KAFKA_DEADLINE_MS = 5_000
#: An append: brokers elect another leader within 10 s of a death at their defaults, and may have to do so twice.
KAFKA_APPEND_DEADLINE_MS = 30_000
#: A broker that accepts connections and answers nothing is given up, and another one asked.
KAFKA_SOCKET_TIMEOUT_MS = 10_000
#: How long a broker holds a fetch that finds nothing: a consumer cannot turn to another offset meanwhile, so this is
#: short; 40 fetches a second cost a client half a percent of a core.
KAFKA_FETCH_WAIT_MS = 25
#: Messages that a consumer holds before we take them: a sixth of a second at 100 MB/s.
KAFKA_QUEUE_BYTES = 16 * MIB
#: Messages of all partitions of a process that are decoded to columns and not read yet, beside the queue.
KAFKA_BUFFER_BYTES = 32 * MIB
#: A partition that nobody reads or waits for is not fetched any more: some epochs, so that who reads one per epoch
#: finds its messages fetched already.
KAFKA_IDLE_MS = 1_000
#: How long after a topic was re-created its readers may find out, where offsets do not show it before.
KAFKA_TOPIC_CHECK_MS = 1_000
#: A leader stamps a message and shows it once its replicas have it, some ms later (an open transaction: much later),
#: and its clock is not ours. Not a proof, but more than what a healthy cluster takes.
KAFKA_STAMPED_AHEAD_MS = 20
#: Kafka logs of streams that nobody uses now, kept open for the next question: each is some five threads and as many
#: connections; most clusters have one or two.
KAFKA_UNUSED_LOGS_MAX = 4

# --- queries ---
QUERY_TEXT_CHARS_MAX = 1 * MIB
QUERY_TIMEOUT_MS = 10_000
#: Pinot's default for every query shape.
DEFAULT_LIMIT = 10
#: Queries a broker or server works on at once; more wait (bounded by their deadline), then are refused with 211.
QUERIES_RUNNING_MAX = 8
#: Beside them, this many short ones: lookups do not wait for scans.
QUERIES_SHORT_MAX = 4
QUERIES_WAITING_MAX = 256
#: Queries a broker has under way at once: most of the time they wait for servers. As many threads reduce as a server
#: has query slots.
BROKER_QUERIES_RUNNING_MAX = 8 * QUERIES_RUNNING_MAX
#: More wait, a few KiB each, then are refused with 429.
BROKER_QUERIES_WAITING_MAX = 1_024
#: Queries that wait for rows to become visible before they take a turn; half of them of one table at most.
BROKER_QUERIES_AWAITING_ROWS_MAX = 256
#: Texts of more than a few KiB that a broker plans at once: up to a megabyte and a second of CPU each.
LONG_TEXTS_PLANNED_MAX = 8
#: Bytes of servers' answers to one query, and to all queries of a broker at once: a query beyond fails alone (245).
QUERY_ANSWER_BYTES_MAX = 1024 * MIB
BROKER_ANSWER_BYTES_MAX = 2 * QUERY_ANSWER_BYTES_MAX
#: Requests to servers to stop a query that a broker has under way; what does not fit ends by its deadline.
CANCELS_RUNNING_MAX = 256
#: Expressions inside each other: DataFusion 55 bears some hundreds before it overflows its stack; its SQL parser
#: counts about two levels per one of ours (RECURSION_LIMIT in exec/engine.py).
QUERY_DEPTH_MAX = 50
#: Conditions and function calls of a query: 2,000 plan in about a second.
QUERY_CALLS_MAX = 2_000
#: Words and signs of a text, beside numbers, strings and commas: 30,000 parse in half a second, a megabyte of them in
#: five. Ten for each of the conditions a query may have.
QUERY_WORDS_MAX = 30_000
#: Columns of a SELECT list as it is written: 5,000 plan in about a second, and the time grows with their square.
QUERY_ITEMS_MAX = 5_000
#: DataFusion 55 evaluates CASE recursively: 500 branches work, 2,000 end the process.
QUERY_CASE_BRANCHES_MAX = 200
#: SQL that a query may become for servers: some times its own text; functions that repeat an argument could multiply
#: it.
QUERY_SQL_CHARS_MAX = 8 * MIB
#: Texts in the arguments of kernels: they are handed over once per row of a batch (64 Ki rows: 64 MiB).
KERNEL_LITERAL_CHARS_MAX = 1_000
#: Digits of a BIG_DECIMAL written out, before and after the point together: 1E+1000 and 1E-1000 are values, and a cell
#: shown in an answer stays below 2 KB (an exponent of nine digits would be a gigabyte of zeros).
BIG_DECIMAL_DIGITS_MAX = 2_000
#: What one call of a text function may make from one batch (8,192 rows): 8 KiB a row. REPEAT, LPAD and REPLACE inside
#: each other would otherwise make gigabytes from nothing.
KERNEL_BYTES_MAX = 64 * MIB
#: Steps of ~4 ns that LEVENSHTEINDISTANCE may take for one batch, which is not stopped in between: a second. Enough for
#: 8,192 pairs of texts of 180 characters.
KERNEL_CELLS_MAX = 256 * 1024 * 1024
#: Plans and parsed texts a broker remembers: some ten KiB each, so ~10 MiB.
PLANS_CACHED_MAX = 1_000
#: Rows of one answer: 10 M rows of ~100 bytes JSON are ~1 GB; beyond that a query must aggregate or page.
ANSWER_ROWS_MAX = 10_000_000

# --- cluster ---
HEARTBEAT_MS = 500
#: Six heartbeats: a pause of garbage collection or a busy laptop must not look like a death.
INSTANCE_DEAD_AFTER_MS = 6 * HEARTBEAT_MS
VIEW_POLL_MS = 10_000
#: Of a table's pipeline. A standby takes over that much after the leader's death; a leader that is not heard of for so
#: long, and lives, loses a second to a restart, and only if somebody waits for its tables.
PIPELINE_LEASE_MS = 2_500
#: A committer reports progress with its heartbeats; lapses after 30 s without any.
COMMIT_LEASE_MS = 30_000
#: Each time a commit is taken over, the next lease is twice as long, up to half an hour.
COMMIT_LEASE_MAX_MS = 30 * 60 * 1000
#: What a commit that may go on without the store waits for its upload: 200 MB at 20 MB/s, and well within the lease.
UPLOAD_WAIT_MS = 10_000
#: Uploads of a server at once, beside builds, commits and queries.
UPLOADS_RUNNING_MAX = 2
#: So many failed uploads in a row say that the store is down: commits that may go on without it wait for it no longer.
BREAKER_FAILURES = 3
#: It is tried again after so long, doubling up to a bound: what an outage lasts longer than it has to.
BREAKER_OPEN_FIRST_MS = 2_000
BREAKER_OPEN_MAX_MS = 60_000  # one look a minute at a store that is down for hours
#: A try that hangs keeps the next one waiting for so long.
BREAKER_PROBE_MS = 60_000
#: An object that no commit named is deleted when the controller does not want it, or after so long without a word.
UPLOAD_UNNAMED_MS = 60 * 60 * 1000
#: Replicas meet a criterion of time within a heartbeat of each other, and repeat their report twice a second.
WINNER_WAIT_MS = 3_000
#: Nobody chooses a cut that a live replica is so far ahead of (as far as tails may lag in a query), until it has
#: reported, too, or ten times the waiting time above has passed.
WINNER_BEHIND_ROWS_MAX = 10_000
WINNER_BEHIND_MS = 10 * WINNER_WAIT_MS  # whoever is that far ahead has met its own criterion by then
INTERNAL_REQUEST_TIMEOUT_MS = 5_000
TABLES_MAX = 1_000
PARTITIONS_MAX = 1_024
#: One question of the controller to a stream: a Kafka cluster answers in milliseconds, one that elects in seconds.
STREAM_CALL_MS = 10_000
#: Questions that wait at once: of some brokers that hang, each round of housekeeping and a few creations.
STREAM_CALLS_MAX = 16
#: Making, growing or deleting a table's topics: brokers take longer for it than for answers.
STREAM_CHANGE_MS = 45_000
#: What `GET /status` and consuming info spend on asking one stream for its end.
STREAM_LOOK_MS = 2_000
#: Segments and tails of one table that move at once: 32 segments of 200 MB are 6 GB on their way.
UNITS_MOVING_MAX = 32
#: A rebalance that got no further for this long has failed (Pinot's externalViewStabilizationTimeoutInMs).
REBALANCE_STALL_MS = 60 * 60 * 1000
#: A server that a rebalance counts on may be away this long (a restart) before the plan is made anew.
REBALANCE_AWAY_MS = 30_000
#: Rewinds of a table whose epochs are remembered as taken back: who asks for older ones is long gone.
REWINDS_KEPT_MAX = 16
#: Jobs of a table that are remembered once they ended.
JOBS_KEPT_MAX = 16

# --- deep store ---
#: One question to the store: an object store answers in tens of milliseconds, a share that fails over in seconds.
STORE_CALL_MS = 5_000
#: A transfer has that and a millisecond for so many bytes (4 MB/s); slower than that is as good as away.
STORE_BYTES_PER_MS_MIN = 4_000
#: Listing a whole store: 100,000 objects at 10,000 a second.
STORE_LIST_MS = 30_000
#: Calls of one process at once, four fetches and two uploads among them; when all of them hang, others fail at once.
STORE_CALLS_MAX = 8
#: A recorded object is looked at after so long: an upload that was swept in that very moment is noticed then.
STORE_LOOK_FIRST_MS = 60_000
#: And then every day: a question costs a store next to nothing, and the segment has copies meanwhile.
STORE_LOOK_EVERY_MS = 24 * 3_600_000
#: Objects looked at in one round, of which there is one every five seconds: 345,600 a day.
STORE_LOOKS_MAX = 20
#: An object up to this size is put in one request, which a taken name refuses; larger ones in parts.
STORE_PUT_ONCE_BYTES_MAX = 64 * MIB

# --- segments between servers ---
#: Archives a server sends at once: queries need its disk and cores more. Who finds no place is told so (429).
PEER_TRANSFERS_MAX = 4
#: Of them, to one and the same server.
PEER_TRANSFERS_EACH_MAX = 2
#: A receiver that takes nothing for so long loses its place.
PEER_STALL_MS = 30_000
#: A peer that accepts no connection for so long: another one is asked.
PEER_CONNECT_MS = 2_000
#: The same for one that sends nothing.
PEER_SILENCE_MS = 10_000
#: Segments that tools download through the controller at once.
CONTROLLER_DOWNLOADS_MAX = 2
#: Checksums of archives that a server remembers, 100 bytes each.
ARCHIVES_KNOWN_MAX = 4_096
#: Fetches of a server at once.
FETCHES_RUNNING_MAX = 4
#: A fetch asks every source so often, half as often when no holder may have it soon; then the epoch log is read again,
#: or it fails with what each of them said, and is tried again with backoff.
FETCH_ROUNDS_MAX = 6
#: Between its rounds; doubles up to the next.
FETCH_WAIT_FIRST_MS = 250
#: Also the most that a peer's Retry-After is heeded.
FETCH_WAIT_MAX_MS = 5_000
#: 8 GB at 5 MB/s.
FETCH_DEADLINE_MS = 30 * 60 * 1000
#: What a segment may take more than its metadata says: another version's writer, and an archive's frame.
FETCH_EXTRA_BYTES_MAX = 64 * MIB

# --- repair ---
#: A server that is away this long is not just restarting: others get what it replicates.
REPAIR_AWAY_MS = 120_000
#: While most servers are away the cluster restarts: then they get this long.
REPAIR_MOSTLY_AWAY_MS = 600_000
#: A replica that stopped on a broken rule is started again, twice as late each time: it may be its own fault.
RESET_BACKOFF_FIRST_MS = 15_000
#: An hour of one partition is looked at twice.
RESET_BACKOFF_MAX_MS = 30 * 60_000
#: Between two tries to mend one segment; doubles with each failure.
REPAIR_BACKOFF_FIRST_MS = 5_000
#: Minutes, not a day.
REPAIR_BACKOFF_MAX_MS = 300_000
#: Uploads that repair has under way in the whole cluster: four of 200 MB at 50 MB/s each end in 16 s.
REPAIR_UPLOADS_MAX = 4
#: One upload that repair asked for: a gigabyte at 10 MB/s.
REPAIR_UPLOAD_TIMEOUT_MS = 100_000
#: Segments on their way to another server because of repair: a quarter of what a rebalance may move.
REPAIR_MOVING_MAX = 8
#: A replica more than wanted is kept for so long: it may be what a stopped rebalance gained, or the config be mended.
SURPLUS_AFTER_MS = 300_000
#: A committer uploads by itself, with its own backoff; after this long without a word others are asked.
UPLOAD_PATIENCE_MS = 120_000
#: Without any copy, and with its range of the epoch log gone, a segment is lost after this: twenty heartbeats in which
#: a report that was on its way arrives.
LOSS_AFTER_MS = 20 * HEARTBEAT_MS
#: While servers that hold copies are only away, much later: a machine boots in minutes. The loss is taken back when one
#: of them returns.
LOSS_AWAY_MS = 600_000

# --- journals ---
#: One of the two files of a role's journal: 30,000 events of 300 bytes.
JOURNAL_BYTES_MAX = 8 * MIB
#: Events of one story that a role tells: 3 MB.
STORY_EVENTS_MAX = 10_000
#: Servers that take longer to tell theirs are named as silent.
STORY_DEADLINE_MS = 3_000

# --- pipeline ---
#: Rows of one epoch at the very most, whatever a table asks for: 10 M rows of ~100 bytes pass through as 160 blocks.
EPOCH_ROWS_MAX = 10_000_000
#: Samples per row block that go to the dead-letter topic: enough to see a pattern, little enough to never matter.
DEAD_LETTERS_PER_BLOCK_MAX = 16
#: Bytes of one row block; what is larger is cut. Half of a record, so that one message's rows always fit beside.
BLOCK_BYTES_MAX = RECORD_BYTES_MAX // 2
#: One answer of a schema registry, which takes milliseconds.
REGISTRY_TIMEOUT_MS = 3_000
#: A registry that restarts takes some seconds; after this the table's query ends and backs off.
REGISTRY_DEADLINE_MS = 10_000
#: A registry that does not know an id is asked again for so long: its replicas follow their leader within milliseconds.
REGISTRY_UNKNOWN_AFTER_MS = 2_000
#: Then it is believed for a minute: a producer that registers nothing costs one question a minute per id.
REGISTRY_UNKNOWN_FOR_MS = 60_000
#: Schemas of a registry that a worker remembers: some KiB each.
REGISTRY_SCHEMAS_MAX = 1_000
#: A page of a seed is asked for so long: brokers and servers that restart are back by then.
SEED_PAGE_DEADLINE_MS = 60_000
#: Keys past their TTL go with a rebuild of the coordinator's state, which happens so often: once a day.
UPSERT_TTL_EVERY_MS = 24 * 3_600_000
#: Where rows are kept for less than a day, as often as that, but not more often than so: ingestion waits meanwhile.
UPSERT_TTL_EVERY_MIN_MS = 3_600_000
#: A segment past its retention waits so long at most for the rebuild that hides its rows first (a paused table has
#: none): two that failed, and the next.
UPSERT_EXPIRY_PATIENCE_MS = 3 * UPSERT_TTL_EVERY_MS
#: An idle table says so this often; its freshness is at most this plus a poll of the server.
PIPELINE_IDLE_MS = 250
#: Five renewals per lease (PIPELINE_LEASE_MS): four may be lost.
PIPELINE_RENEW_MS = 500
#: How often a pipeline asks for a lease that somebody else holds.
PIPELINE_ASK_MS = 250
#: A table that no pipeline has ever had is left to pipelines that are not on standby for so long.
STANDBY_PATIENCE_MS = 10_000
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
#: What the tails of one server take of its memory together before they spill sooner, and then wait.
TAIL_HEAP_BYTES_MAX = 1024 * MIB
#: Undecided rows of one server on disk; past it the tail stops with a named state instead of filling the disk.
TAIL_DISK_BYTES_MAX = 8 * 1024 * MIB

# --- epoch log readers ---
#: Closed epochs that a reader or a start can go back to on a Reset: half an hour at two a second, ~200 bytes each.
EPOCHS_REMEMBERED = 4_096
#: Content hashes of unclosed blocks that a reader compares: more than any epoch has (64 Ki full blocks would be 4 G
#: rows); ~200 bytes each, so 13 MB at the very most.
UNCLOSED_BLOCKS_MAX = 64 * 1024
