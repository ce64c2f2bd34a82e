# SPDX-License-Identifier: Apache-2.0
"""Which decoder a table's stream needs, made from its config."""

from __future__ import annotations

from collections.abc import Callable

from cremant.ingest.decode_avro import AvroDecoder, RegistryDecoder
from cremant.ingest.decode_csv import CsvDecoder
from cremant.ingest.decode_json import JsonDecoder
from cremant.ingest.messages import Decoder
from cremant.ingest.registry import parse_registry
from cremant.model.errors import InvalidConfig
from cremant.model.schema import FieldSpec
from cremant.model.table import StreamConfig

#: Reads the text of a file that a config names. May raise OSError.
ReadText = Callable[[str], str]


def make_decoder(
    stream: StreamConfig, fields: tuple[FieldSpec, ...], *, keep_going: bool, read_text: ReadText | None = None
) -> Decoder | None:
    """None if the decoder needs a file and there is no `read_text` (the config is otherwise checked). Raises
    InvalidConfig."""
    properties = stream.decoder_properties
    match stream.decoder:
        case "json":
            return JsonDecoder(fields, keep_going=keep_going)
        case "csv":
            return CsvDecoder(fields, properties, keep_going=keep_going)
        case "avroRegistry":
            parse_registry(properties)
            return RegistryDecoder(fields, keep_going=keep_going)
        case "avro":
            text = properties.get("schema", "").strip()
            if not text.startswith("{"):
                if read_text is None:
                    return None
                text = _read(text, read_text)
            return AvroDecoder(fields, text, keep_going=keep_going)
        case _:
            raise InvalidConfig(f"decoder {stream.decoder!r} is not supported by this version")


def _read(path: str, read_text: ReadText) -> str:
    path = path.removeprefix("file://")
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(
            f"Avro decoder: schema {path} cannot be read: {error}",
            hint="the schema as JSON text, or a file that every pipeline process can read",
        ) from None
