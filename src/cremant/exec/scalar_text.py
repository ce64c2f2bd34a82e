# SPDX-License-Identifier: Apache-2.0
"""Text functions that DataFusion has not, or has with other rules than Java.

Regular expressions here are RE2's (Arrow): linear in the length of the text, whatever the pattern.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import unicodedata
import urllib.parse
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cremant.exec.functions import Factory
from cremant.exec.kernels import by_distinct, by_pair, bytes_of, check_bytes, constant, scalar
from cremant.log.partitioner import murmur2
from cremant.model.limits import KERNEL_CELLS_MAX

_TEXT, _INT, _LONG, _BYTES = pa.string(), pa.int32(), pa.int64(), pa.binary_view()
_TEXTS = pa.list_(pa.string())


def _position(text: pa.Array, find: pa.Array, nth: pa.Array) -> pa.Array:
    """Where `find` begins for the n-th time, from 0; -1: nowhere. Occurrences may overlap."""
    wanted, count = constant(find), constant(nth)

    def one(value: str) -> int:
        at = -1
        for _ in range(count):
            at = value.find(wanted, at + 1)
            if at < 0:
                return -1
        return at

    return by_distinct(one, text, _INT)


def _last_position(text: pa.Array, find: pa.Array, start: pa.Array) -> pa.Array:
    """Where `find` begins for the last time, at `start` or before it."""
    wanted, most = constant(find), constant(start)
    if most is not None and most < 0:
        return by_distinct(lambda value: -1, text, _INT)
    end = None if most is None else most + len(wanted or "")
    return by_distinct(lambda value: value.rfind(wanted, 0, end), text, _INT)


def _repeat(text: pa.Array, separator: pa.Array, times: pa.Array) -> pa.Array:
    count, between = max(0, constant(times) or 0), constant(separator) or ""
    check_bytes((bytes_of(text) + len(between) * len(text)) * count)
    return by_distinct(lambda value: between.join([value] * count), text, _TEXT)


def _pad(left: bool) -> Callable[[pa.Array, pa.Array, pa.Array], pa.Array]:
    def compute(text: pa.Array, size: pa.Array, padding: pa.Array) -> pa.Array:
        width, fill = constant(size) or 0, constant(padding) or " "
        check_bytes(bytes_of(text) + max(0, width) * len(text))

        def one(value: str) -> str:
            missing = width - len(value)
            if missing <= 0:
                return value
            added = (fill * (missing // len(fill) + 1))[:missing]
            return added + value if left else value + added

        return by_distinct(one, text, _TEXT)

    return compute


def _replace(text: pa.Array, find: pa.Array, new: pa.Array) -> pa.Array:
    old, added = constant(find), constant(new)
    if not old or old is None or added is None:
        return text
    if len(added) > len(old):
        found = pc.sum(pc.count_substring(text, old)).as_py() or 0
        check_bytes(bytes_of(text) + found * len(added.encode()))
    return pc.replace_substring(text, old, added)


def _regexp_extract(text: pa.Array, pattern: pa.Array, default: pa.Array) -> pa.Array:
    """The group called `g` of the first match."""
    found = pc.extract_regex(text, constant(pattern))
    group = pc.struct_field(found, "g")
    taken = pc.if_else(found.is_valid(), group, default)
    return pc.if_else(text.is_valid(), taken, pa.scalar(None, _TEXT))


def _regexp_replace(text: pa.Array, pattern: pa.Array, new: pa.Array, start: pa.Array, most: pa.Array) -> pa.Array:
    """`most`: so many replacements from the left, -1: all."""
    regex, added, first, limit = constant(pattern), constant(new), constant(start) or 0, constant(most)
    if regex is None or added is None:
        return pa.nulls(len(text), _TEXT)
    found = pc.sum(pc.count_substring_regex(text, regex)).as_py() or 0
    check_bytes(bytes_of(text) * (1 + added.count("\\")) + found * len(added.encode()))
    if first <= 0:
        return pc.replace_substring_regex(text, regex, added, max_replacements=limit)
    head, tail = pc.utf8_slice_codeunits(text, 0, first), pc.utf8_slice_codeunits(text, first)
    return pc.binary_join_element_wise(head, pc.replace_substring_regex(tail, regex, added, max_replacements=limit), "")


def split(text: str, separator: str, limit: int) -> list[str]:
    """As commons-lang's splitByWholeSeparator: separators side by side count as one, but for those at the end."""
    if not separator:
        return text.split() if limit <= 0 else text.split(maxsplit=limit - 1)
    parts: list[str] = []
    begin, end = 0, 0
    while end < len(text):
        end = text.find(separator, begin)
        if end < 0:
            parts.append(text[begin:])
            break
        if end > begin:
            if limit > 0 and len(parts) + 1 == limit:
                parts.append(text[begin:])
                break
            parts.append(text[begin:end])
        begin = end + len(separator)
    return parts


def _split(text: pa.Array, separator: pa.Array, limit: pa.Array) -> pa.Array:
    sign, most = constant(separator) or "", constant(limit) or 0
    return by_distinct(lambda value: split(value, sign, most), text, _TEXTS)


def _split_part(text: pa.Array, separator: pa.Array, limit: pa.Array, index: pa.Array) -> pa.Array:
    """The part at `index` (from 0; negative: from the end), else the text `null`."""
    sign, most, at = constant(separator) or "", constant(limit) or 0, constant(index)

    def one(value: str) -> str:
        parts = split(value, sign, most)
        return parts[at] if -len(parts) <= at < len(parts) else "null"

    return by_distinct(one, text, _TEXT)


def _pairs(one: Callable[[str, str], Any], kind: pa.DataType) -> Callable[[pa.Array, pa.Array], pa.Array]:
    return lambda left, right: by_pair(one, left, right, kind)


def hamming(left: str, right: str) -> int:
    """How many places differ; -1 for texts of different length."""
    return -1 if len(left) != len(right) else sum(a != b for a, b in zip(left, right, strict=True))


def _comparable(left: pa.Array, right: pa.Array) -> pa.Array:
    """`left`, if all cells of the tables of an edit distance to `right` are not too many: a batch cannot be stopped."""
    cells = pc.sum(pc.multiply(pc.utf8_length(left).cast(pa.int64()), pc.utf8_length(right).cast(pa.int64()))).as_py()
    if (cells or 0) > KERNEL_CELLS_MAX:
        raise ValueError(
            f"LEVENSHTEINDISTANCE of {len(left)} pairs of texts this long takes {cells} steps, at most "
            f"{KERNEL_CELLS_MAX} are allowed; shorten them with SUBSTR"
        )
    return left


def compare_texts(left: str, right: str) -> int:
    """java.lang.String.compareTo: the difference of the first characters that differ, else of the lengths."""
    return next((ord(a) - ord(b) for a, b in zip(left, right, strict=False) if a != b), len(left) - len(right))


def encode_url(text: str) -> str:
    """java.net.URLEncoder: letters, digits and `.-*_` stay, a space becomes `+`."""
    return urllib.parse.quote_plus(text, safe="*").replace("~", "%7E")


def _from_base64(text: str) -> str:
    try:
        return base64.b64decode(text, validate=True).decode("utf-8", "replace")
    except binascii.Error as error:
        raise ValueError(f"FROMBASE64: {text[:100]!r} is not base64") from error


def _decode_url(text: str) -> str:
    return urllib.parse.unquote_plus(text)


def _hex_to_bytes(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise ValueError(f"{text[:100]!r} is not a text of hex digits, as BYTES are written") from error


def _signed(number: int) -> int:
    return number - (1 << 32) if number >= 1 << 31 else number


def _murmur2(data: pa.Array) -> pa.Array:
    """The hash of Kafka's default partitioner, as a Java int."""
    hashes = pa.array(murmur2(data.cast(pa.binary()).fill_null(b"").to_pylist()).view(np.int32))
    return pc.if_else(data.is_valid(), hashes, pa.scalar(None, _INT))


def _normalize(text: pa.Array, form: pa.Array) -> pa.Array:
    name = constant(form)
    return by_distinct(lambda value: unicodedata.normalize(name, value), text, _TEXT)


def _of_text(one: Callable[[str], Any], kind: pa.DataType) -> Callable[[pa.Array], pa.Array]:
    return lambda text: by_distinct(one, text, kind)


def _of_bytes(one: Callable[[bytes], Any], kind: pa.DataType) -> Callable[[pa.Array], pa.Array]:
    return lambda data: by_distinct(one, data, kind)


def _digest(name: str) -> Callable[[pa.Array], pa.Array]:
    return _of_bytes(lambda data: hashlib.new(name, data, usedforsecurity=False).hexdigest(), _TEXT)


FUNCTIONS: dict[str, Factory] = dict(
    [
        scalar("fn_strpos_nth", _position, [_TEXT, _TEXT, _LONG], _INT),
        scalar("fn_strrpos", _last_position, [_TEXT, _TEXT, _LONG], _INT),
        scalar("fn_repeat", _repeat, [_TEXT, _TEXT, _LONG], _TEXT),
        scalar("fn_lpad", _pad(True), [_TEXT, _LONG, _TEXT], _TEXT),
        scalar("fn_rpad", _pad(False), [_TEXT, _LONG, _TEXT], _TEXT),
        scalar("fn_replace", _replace, [_TEXT, _TEXT, _TEXT], _TEXT),
        scalar("fn_regexp_extract", _regexp_extract, [_TEXT, _TEXT, _TEXT], _TEXT),
        scalar("fn_regexp_replace", _regexp_replace, [_TEXT, _TEXT, _TEXT, _LONG, _LONG], _TEXT),
        scalar("fn_split", _split, [_TEXT, _TEXT, _LONG], _TEXTS),
        scalar("fn_split_part", _split_part, [_TEXT, _TEXT, _LONG, _LONG], _TEXT),
        scalar("fn_comparable", _comparable, [_TEXT, _TEXT], _TEXT),
        scalar("fn_hamming", _pairs(hamming, _INT), [_TEXT, _TEXT], _INT),
        scalar("fn_strcmp", _pairs(compare_texts, _INT), [_TEXT, _TEXT], _INT),
        scalar("fn_encode_url", _of_text(encode_url, _TEXT), [_TEXT], _TEXT),
        scalar("fn_decode_url", _of_text(_decode_url, _TEXT), [_TEXT], _TEXT),
        scalar("fn_to_base64", _of_text(lambda text: base64.b64encode(text.encode()).decode(), _TEXT), [_TEXT], _TEXT),
        scalar("fn_from_base64", _of_text(_from_base64, _TEXT), [_TEXT], _TEXT),
        scalar("fn_normalize", _normalize, [_TEXT, _TEXT], _TEXT),
        scalar("fn_to_utf8", _of_text(str.encode, _BYTES), [_TEXT], _BYTES),
        scalar("fn_to_ascii", _of_text(lambda text: text.encode("ascii", "replace"), _BYTES), [_TEXT], _BYTES),
        scalar("fn_from_utf8", _of_bytes(lambda data: data.decode("utf-8", "replace"), _TEXT), [_BYTES], _TEXT),
        scalar("fn_from_ascii", _of_bytes(lambda data: data.decode("ascii", "replace"), _TEXT), [_BYTES], _TEXT),
        scalar("fn_hex_to_bytes", _of_text(_hex_to_bytes, _BYTES), [_TEXT], _BYTES),
        scalar("fn_bytes_to_hex", _of_bytes(bytes.hex, _TEXT), [_BYTES], _TEXT),
        scalar("fn_bytes_base64", _of_bytes(lambda data: base64.b64encode(data).decode(), _TEXT), [_BYTES], _TEXT),
        scalar("fn_base64_bytes", _of_text(base64.b64decode, _BYTES), [_TEXT], _BYTES),
        *(
            scalar(f"fn_{name}", _digest(name), [_BYTES], _TEXT)
            for name in ("md5", "sha1", "sha224", "sha256", "sha512")
        ),
        scalar("fn_crc32", _of_bytes(lambda data: _signed(zlib.crc32(data)), _INT), [_BYTES], _INT),
        scalar("fn_adler32", _of_bytes(lambda data: _signed(zlib.adler32(data)), _INT), [_BYTES], _INT),
        scalar("fn_murmur2", _murmur2, [_BYTES], _INT),
    ]
)  # fmt: skip
