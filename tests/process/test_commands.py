# SPDX-License-Identifier: Apache-2.0
"""What a user does in the first hour, with the real commands: up, table, produce, query, pause, Ctrl-C, start again."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pinotdb
import pyarrow as pa
import pytest
from bench.cluster import ClusterError, LocalCluster, command
from ledger import BUCKETS_SQL, SCHEMA, TOTAL_SQL, table_config

ROWS = 2_000
VISIBLE_S = 240.0


def ledger_lines(first: int, count: int) -> tuple[str, list[list[Any]]]:
    """Keyed lines, and the [count, sum] they add."""
    lines = []
    total = 0
    for number in range(first, first + count):
        value = number % 97
        total += value
        row = {"key": f"key-{number}", "bucket": number % 8, "v": value, "ts": 1_760_000_000_000 + number, "note": "é"}
        lines.append(json.dumps({"key": row["key"], "value": row}))
    return "\n".join(lines) + "\n", [[count, float(total)]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("commands") / "data") as running:
        yield running


def test_a_first_hour(cluster: LocalCluster, tmp_path: Path, phase: Callable[[str], None]) -> None:
    """Order matters here: one cluster start is 15 seconds, and a user does these things in this order, too."""
    phase("topic, schema, table")
    created = json.loads(cluster.run("topic", "create", "ledger", "--partitions", "4", "--json").stdout)
    assert created == {"topic": "ledger", "partitions": 4}
    assert "already" in cluster.run("topic", "create", "ledger", check=False).stderr
    listed = json.loads(cluster.run("topic", "list", "--json").stdout)["topics"]
    assert [(topic["name"], topic["partitions"], topic["messages"]) for topic in listed] == [("ledger", 4, 0)]
    cluster.rest.add_table(SCHEMA, table_config(flush_rows=1_000_000))
    assert cluster.rest.call("GET", "/tables")["tables"] == ["ledger"]

    phase("produce from stdin, from a file, over HTTP")
    lines, first = ledger_lines(0, ROWS)
    produced = json.loads(cluster.run("produce", "ledger", "-", "--keyed", "--json", stdin=lines).stdout)
    assert produced["messages"] == ROWS
    assert set(produced["offsets"]) == {"0", "1", "2", "3"}
    assert sum(end - start for spans in produced["offsets"].values() for start, end in spans) == ROWS
    cluster.rest.wait_for(TOTAL_SQL, first, deadline_s=VISIBLE_S)

    more, second = ledger_lines(ROWS, ROWS)
    file = tmp_path / "rows.jsonl"
    file.write_text(more, encoding="utf-8")
    assert "offsets" in cluster.run("produce", "ledger", str(file), "--keyed").stdout
    body, third = ledger_lines(2 * ROWS, 100)
    answer = cluster.rest.call("POST", "/topics/ledger?keyed=true", content=body.encode())
    assert answer["messages"] == 100
    total = [[2 * ROWS + 100, first[0][1] + second[0][1] + third[0][1]]]
    cluster.rest.wait_for(TOTAL_SQL, total, deadline_s=VISIBLE_S)

    phase("cremant sql in every format, status")
    as_table = cluster.run("sql", BUCKETS_SQL).stdout
    assert "bucket" in as_table
    as_json = json.loads(cluster.run("sql", TOTAL_SQL, "--format", "json").stdout)
    assert as_json["resultTable"]["rows"] == total
    as_csv = cluster.run("sql", TOTAL_SQL, "--format", "csv").stdout.splitlines()
    assert as_csv == ["count(*),sum(v)", f"{total[0][0]},{total[0][1]}"]
    status = json.loads(cluster.run("status", "--json").stdout)
    assert sorted(role["role"] for role in status["instances"] if role["live"]) == [
        "broker", "controller", "pipeline", "server", "server",
    ]  # fmt: skip
    (table,) = status["tables"]
    assert (table["name"], table["state"], len(table["partitions"])) == ("ledger", "running", 4)
    assert (table["rows"], table["lagRows"]) == (total[0][0], 0)
    assert "ledger" in cluster.run("status").stdout

    phase("pause and resume")
    cluster.rest.call("POST", "/tables/ledger/pauseConsumption")
    _wait_for_state(cluster, "paused")
    late, fourth = ledger_lines(5 * ROWS, 50)
    cluster.run("produce", "ledger", "-", "--keyed", stdin=late)
    time.sleep(1.5)
    assert cluster.rest.rows(TOTAL_SQL) == total
    cluster.rest.call("POST", "/tables/ledger/resumeConsumption")
    total = [[total[0][0] + 50, total[0][1] + fourth[0][1]]]
    cluster.rest.wait_for(TOTAL_SQL, total, deadline_s=VISIBLE_S)

    phase("pinotdb")
    host, port = cluster.rest.broker.removeprefix("http://").rsplit(":", 1)
    connection = pinotdb.connect(host=host, port=int(port), path="/query/sql", scheme="http")
    cursor = connection.cursor()
    cursor.execute("SELECT key, v FROM ledger WHERE key = %(key)s", {"key": "key-7"})
    assert list(cursor) == [["key-7", 7]]
    cursor.execute("SELECT bucket, COUNT(*) AS n FROM ledger GROUP BY bucket ORDER BY bucket LIMIT 3")
    assert [row[0] for row in cursor] == [0, 1, 2]

    phase("Ctrl-C")
    started = time.monotonic()
    pids = cluster.pids()
    cluster.stop()
    assert time.monotonic() - started < 15
    assert not [pid for pid in pids.values() if Path(f"/proc/{pid}").exists()]
    assert not (cluster.data_dir / "cluster.json").exists()

    phase("a second start finds its data")
    cluster.start()
    took = cluster.rest.wait_for(TOTAL_SQL, total, deadline_s=VISIBLE_S)
    again, fifth = ledger_lines(9 * ROWS, 50)
    cluster.run("produce", "ledger", "-", "--keyed", stdin=again)
    total = [[total[0][0] + 50, total[0][1] + fifth[0][1]]]
    cluster.rest.wait_for(TOTAL_SQL, total, deadline_s=VISIBLE_S)
    phase(f"answers {took:.1f} s after the restart; drop the table")
    cluster.rest.call("DELETE", "/tables/ledger")
    cluster.rest.call("DELETE", "/schemas/ledger")
    _wait_until(lambda: cluster.rest.call("GET", "/tables")["tables"] == [], 120)


def test_errors_are_one_line_and_a_hint(cluster: LocalCluster) -> None:
    for arguments, status, telling in (
        (("sql", "SELECT * FROM nowhere"), 2, "cremant status"),
        (("sql", "SELEC 1"), 2, "SQL"),
        (("produce", "no-such-topic", "-"), 2, "no-such-topic"),
        (("topic", "delete", "no-such-topic"), 2, "no-such-topic"),
        (("produce", "no-such-topic", "/no/such/file"), 2, "/no/such/file"),
    ):
        done = cluster.run(*arguments, stdin='{"a": 1}\n', check=False)
        assert done.returncode == status, done
        assert telling in done.stderr
        assert "Traceback" not in done.stderr
        assert len(done.stderr.strip().splitlines()) <= 4, done.stderr


def test_an_arrow_answer_is_an_arrow_stream(cluster: LocalCluster) -> None:
    done = subprocess.run(
        command("sql", "SELECT 1 AS one", "--format", "arrow", "--data-dir", str(cluster.data_dir)),
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert pa.ipc.open_stream(io.BytesIO(done.stdout)).read_all().to_pylist() == [{"one": 1}]


def test_tables_by_command(cluster: LocalCluster, tmp_path: Path) -> None:
    schema, table, both = (tmp_path / f"{name}.json" for name in ("schema", "table", "both"))
    config = table_config(flush_rows=1_000)
    config["tableIndexConfig"]["streamConfigs"]["sasl.password"] = "hunter2"
    schema.write_text(json.dumps(SCHEMA), encoding="utf-8")
    table.write_text(json.dumps(config), encoding="utf-8")
    both.write_text(json.dumps({"tableName": "ledger", "schema": SCHEMA, "realtime": config}), encoding="utf-8")

    missing = cluster.run("table", "create", str(schema), str(table).replace("table.json", "nowhere.json"), check=False)
    assert (missing.returncode, "nowhere.json" in missing.stderr) == (2, True)
    if "ledger" not in [topic["name"] for topic in json.loads(cluster.run("topic", "list", "--json").stdout)["topics"]]:
        no_topic = cluster.run("table", "create", str(both), check=False)
        assert (no_topic.returncode, "cremant topic create ledger" in no_topic.stderr) == (2, True), no_topic.stderr
        assert "ledger" not in cluster.rest.call("GET", "/schemas"), "a schema whose table was refused is taken back"
        cluster.run("topic", "create", "ledger", "--partitions", "2")
    assert "nothing was created" in cluster.run("table", "create", "--check", str(both)).stderr
    cluster.run("table", "create", str(schema), str(table))
    cluster.run("produce", "ledger", "-", "--table", stdin=ledger_lines(0, 10)[0].replace('"key": "key', '"k": "key'))

    shown = cluster.run("table", "show", "ledger").stdout
    assert "hunter2" not in shown
    assert all(word in shown for word in ("bucket", "partition", "replica", "lag", "*****", "streamConfigs"))
    assert "ledger" in cluster.run("table", "list").stdout
    assert "did you mean ledger" in cluster.run("table", "show", "leger", check=False).stderr
    cluster.run("table", "pause", "ledger", "--comment", "because")
    _wait_for_state(cluster, "paused")
    cluster.run("table", "resume", "ledger")
    refused = cluster.run("table", "drop", "ledger", check=False)
    assert (refused.returncode, "--yes" in refused.stderr) == (2, True)
    assert json.loads(cluster.run("table", "drop", "ledger", "--yes", "--json").stdout)["dropped"] == [
        "table",
        "schema",
    ]
    _wait_until(lambda: cluster.rest.call("GET", "/tables")["tables"] == [], 120)
    assert "ledger" not in cluster.rest.call("GET", "/schemas")


def test_the_doctor_finds_this_cluster_well_and_a_missing_kafka_not(cluster: LocalCluster) -> None:
    well = json.loads(cluster.run("doctor", "--json").stdout)
    assert well["ok"], [finding for finding in well["findings"] if finding["level"] == "fail"]
    assert {"java", "pyspark", "data directory", "clock", "controller", "broker", "server", "pipeline"} <= {
        finding["check"] for finding in well["findings"]
    }
    ill = cluster.run("doctor", "--kafka", "127.0.0.1:1", check=False)
    assert ill.returncode == 1
    assert "127.0.0.1:1" in ill.stdout
    assert "fix:" in ill.stdout


def test_a_conversation_at_a_terminal(cluster: LocalCluster, tmp_path: Path) -> None:
    terminal = Terminal(["sql", "--data-dir", str(cluster.data_dir)], tmp_path)
    try:
        terminal.expect("cremant>")
        terminal.type("SELECT 40 + 2 AS answer,\r")
        terminal.type("  'x' AS letter;\r")
        terminal.expect("letter")
        terminal.expect("(1 row")
        terminal.expect("cremant>")
        terminal.type("SELEC 1;\r")
        terminal.expect("error:")
        terminal.type("\\d\r")
        terminal.expect("no tables")
        terminal.type("\\format csv\r")
        terminal.type("SELECT 1 AS one;\r")
        terminal.expect("one\r\n1\r\n")
        terminal.expect("cremant>")
        terminal.type("\x04")
        assert terminal.wait() == 0
    finally:
        terminal.close()
    history = (tmp_path / "cremant" / "sql_history").read_text(encoding="utf-8")
    assert "letter" in history


def test_a_script_from_a_pipe_ends_at_its_first_error(cluster: LocalCluster) -> None:
    done = cluster.run("sql", "--format", "csv", stdin="SELECT 1 AS a;\nSELECT 2 AS b", check=True)
    assert done.stdout.split() == ["a", "1", "b", "2"]
    done = cluster.run("sql", "--format", "csv", stdin="SELEC 1; SELECT 2 AS b;", check=False)
    assert (done.returncode, done.stdout) == (2, "")


class Terminal:
    """A command at a pseudo terminal, as a person sits there."""

    def __init__(self, arguments: list[str], state: Path) -> None:
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            environment = {**os.environ, "TERM": "xterm", "XDG_STATE_HOME": str(state), "PROMPT_TOOLKIT_NO_CPR": "1"}
            words = command(*arguments)
            os.execvpe(words[0], words, environment)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self._seen = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def expect(self, text: str, deadline_s: float = 60.0) -> None:
        """Reads on until the text has come; what came before it is forgotten."""
        until = time.monotonic() + deadline_s
        while text not in self._seen:
            readable, _, _ = select.select([self._fd], [], [], 0.2)
            if readable:
                with contextlib.suppress(OSError):  # the end of the terminal
                    self._seen += _ESCAPES.sub("", os.read(self._fd, 65_536).decode("utf-8", "replace"))
            assert time.monotonic() < until, f"no {text!r} in {self._seen[-2000:]!r}"
        self._seen = self._seen.partition(text)[2]

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def close(self) -> None:
        os.close(self._fd)


#: Colours, cursor movements, modes.
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[()=>][0-9A-B]?")


def _wait_for_state(cluster: LocalCluster, state: str) -> None:
    def reached() -> bool:
        (table,) = cluster.rest.call("GET", "/status")["tables"]
        report = table["pipeline"]["report"] or {}
        return bool(table["state"] == state and report.get("state") == state)

    _wait_until(reached, 120)


def _wait_until(reached: Callable[[], bool], deadline_s: float) -> None:
    until = time.monotonic() + deadline_s
    while not reached():
        if time.monotonic() > until:
            raise ClusterError(f"not reached within {deadline_s} s")
        time.sleep(0.2)


def test_the_commands_of_the_readme_do_what_it_says(cluster: LocalCluster) -> None:
    """Its section on a table of one's own, block by block in a shell, with our ports in place of the usual ones."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    section = readme.split("## A table of your own")[1].split("\n## ")[0]
    blocks = [textwrap.dedent(block) for block in re.findall(r"(?:^    .*\n|^\n(?=    ))+", section, re.MULTILINE)]
    commands = [block for block in blocks if "cremant " in block or "curl " in block]
    assert len(commands) == 2, "produce-and-ask block and HTTP produce block"
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "CREMANT_DATA_DIR": str(cluster.data_dir),
    }
    for block in commands:
        script = block.replace("http://127.0.0.1:9000", cluster.rest.controller)
        asking = [line for line in script.splitlines() if line.startswith("cremant sql")]
        script = "\n".join(line for line in script.splitlines() if line not in asking)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script], env=environment, capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert '"error"' not in done.stdout, done.stdout
    cluster.rest.wait_for("SELECT sensor, AVG(celsius) FROM readings GROUP BY sensor", [["a", 21.75]], deadline_s=240)
    cluster.rest.call("DELETE", "/tables/readings")
