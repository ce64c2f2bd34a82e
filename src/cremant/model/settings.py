# SPDX-License-Identifier: Apache-2.0
"""Settings of a process: name, unit, default, meaning. Defaults < file < environment (`CREMANT_…`) < flags."""

from __future__ import annotations

from typing import Any, NamedTuple

from cremant.model.errors import InvalidConfig


class Setting(NamedTuple):
    name: str
    default: Any
    unit: str
    doc: str


SETTINGS: tuple[Setting, ...] = (
    Setting("data_dir", "./cremant-data", "path", "Everything a role keeps on disk."),
    Setting("log_dir", "", "path", "Directory of the embedded log; empty = <data_dir>/log."),
    Setting("store_uri", "", "URI", "Deep store: a path or file:// (a share that all servers see), or "
            "s3://bucket/prefix; empty = the directory <data_dir>/store, which is as safe as this machine."),
    Setting("store_properties", "", "path", "Properties file (key=value) for the client of S3: endpoint, region, "
            "access_key_id, secret_access_key, …; values may be ${env:NAME} or ${file:PATH}."),
    Setting("fetch_order", "store,peer", "comma list", "Where a server fetches a sealed segment that it lacks: store = "
            "the deep store, if it has it; peer = other servers. What is left out is not asked."),
    Setting("peer_bytes_per_s", 64 * 1024 * 1024, "bytes/s", "What a server sends to others of its sealed "
            "segments, all transfers together; 0 = no limit."),
    Setting("catch_up_max_ms", 60_000, "ms", "How long a server that has started, and read all that was in the log "
            "then, may wait to be fresh before it is asked all the same."),
    Setting("tls_cert", "", "path", "Certificate (PEM, with those between it and the authority) of a server's HTTPS "
            "listener, where others fetch sealed segments; empty = no such listener."),
    Setting("tls_key", "", "path", "Its private key (PEM); empty = in the file of tls_cert."),
    Setting("tls_key_password", "", "reference", "Password of that key, as ${env:NAME} or ${file:PATH}."),
    Setting("tls_port", 0, "port", "Where the HTTPS listener listens; 0 = any free port."),
    Setting("tls_ca", "", "path", "Authorities (PEM) that signed for the other servers; empty = those of the system."),
    Setting("host", "127.0.0.1", "address", "Address to listen on; any other than loopback needs --insecure."),
    Setting("controller_url", "http://127.0.0.1:9000", "URL", "Where the controller listens."),
    Setting("log_fsync", "never", "never|always", "When appends reach the disk: never = survives kill -9 of any "
            "process but not a power cut; always = survives both, slower."),
    Setting("log_segment_bytes", 64 * 1024 * 1024, "bytes", "Size at which a file of the embedded log is rolled."),
    Setting("log_retention_ms", 7 * 24 * 3600 * 1000, "ms", "Age at which stream files are dropped; 0 = never."),
    Setting("epoch_log", "embedded", "embedded|kafka", "Where epoch logs and dead letters are kept: in log_dir, which "
            "all processes must share, or in Kafka. Tables name their streams themselves."),
    Setting("kafka_brokers", "", "host:port list", "Brokers of the epoch log when epoch_log is kafka."),
    Setting("kafka_properties", "", "path", "Properties file (key=value) for the clients of these brokers: "
            "security.protocol, sasl.*, ssl.*; values may be ${env:NAME} or ${file:PATH}."),
    Setting("kafka_replication", 0, "replicas", "Replication of the topics we create in Kafka; 0 = the brokers' "
            "default."),
    Setting("spark_master", "local[2]", "Spark master", "Where the pipeline runs its tasks."),
    Setting("spark_driver_memory", "1g", "JVM size", "Heap of the Spark driver."),
    Setting("pipeline_quick_files", 1, "0|1", "1: Spark's checkpoints are written by a local file system that starts "
            "no processes (a small jar in the package); 0: by Hadoop's own, about 100 ms slower per epoch."),
    Setting("checkpoint_dir", "", "path", "Where the pipeline keeps Spark's checkpoints: a directory on a file system "
            "that leader and standby share; empty = <data_dir>."),
    Setting("pipeline_modules", "", "comma list", "Modules from which tables may name a pipeline function."),
    Setting("query_threads", 2, "threads", "Threads that run one process's queries."),
    Setting("query_memory_bytes", 2 * 1024 * 1024 * 1024, "bytes", "Memory of all running queries of a process."),
)  # fmt: skip

_BY_NAME = {setting.name: setting for setting in SETTINGS}
#: What the designs behind Cremant call a setting -> ours.
_ALIASES = {"segment.store.root.dir": "store_uri"}


class Settings:
    """Resolved settings; attribute access by name, `source(name)` says where a value came from."""

    def __init__(self, *layers: tuple[str, dict[str, Any]]) -> None:
        self._values: dict[str, Any] = {setting.name: setting.default for setting in SETTINGS}
        self._sources: dict[str, str] = dict.fromkeys(self._values, "default")
        for source, layer in layers:
            for name, value in layer.items():
                self._set(name, value, source)
            for alias in _ALIASES.keys() & layer.keys():
                if _ALIASES[alias] in layer:
                    raise InvalidConfig(f"{source} has {alias} and {_ALIASES[alias]}: both mean the same")

    def _set(self, name: str, value: Any, source: str) -> None:
        name = _ALIASES.get(name, name)
        setting = _BY_NAME.get(name)
        if setting is None:
            raise InvalidConfig(f"unknown setting {name!r} from {source}", hint=f"known: {', '.join(_BY_NAME)}")
        if isinstance(setting.default, int) and not isinstance(value, int):
            try:
                value = int(value)
            except ValueError:
                raise InvalidConfig(
                    f"setting {name} from {source}: expected a number of {setting.unit}, found {value!r}"
                ) from None
        self._values[name] = value
        self._sources[name] = source

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(name) from None

    def source(self, name: str) -> str:
        return self._sources[name]
