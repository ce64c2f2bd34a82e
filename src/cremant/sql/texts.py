# SPDX-License-Identifier: Apache-2.0
"""Functions of texts and bytes: Java's rules (positions from 0; SUBSTR's end is exclusive; pads never shorten)."""

from __future__ import annotations

from cremant.model.schema import DataType
from cremant.sql.bound import Bound, as_type, invalid, text_sql
from cremant.sql.regex import JavaPattern, replacement
from cremant.sql.scalar import Args, Bind, Scalar, integer_arg, literal_text, text_arg, whole, word

_STRING, _INT, _BOOLEAN, _BYTES = DataType.STRING, DataType.INT, DataType.BOOLEAN, DataType.BYTES
#: What Java's trim() takes off, and what its \s means.
_BLANKS = text_sql("".join(chr(code) for code in range(1, 33)))
_SPACES = text_sql(" \t\n\x0b\f\r")


def _string(template: str, function: str, kind: DataType = _STRING) -> Bind:
    def bind(args: Args) -> Bound:
        return Bound(template.format(*(text_arg(arg, function) for arg in args)), kind)

    return bind


def _bytes_arg(bound: Bound, function: str) -> str:
    if bound.multi or (bound.type is not _BYTES and bound.type is not None):
        raise invalid(f"{function} takes BYTES, found {bound.type}", hint=f"{function}(toUtf8(...)) takes a text")
    return as_type(bound, _BYTES) if bound.type else "CAST(NULL AS BYTEA)"


def _of_bytes(kernel: str, function: str, kind: DataType = _STRING) -> Bind:
    return lambda args: Bound(f"{kernel}({_bytes_arg(args[0], function)})", kind)


def _substr(args: Args) -> Bound:
    """SUBSTR(s, start[, end]): positions from 0, `end` is exclusive, -1 means to the end."""
    text, start = text_arg(args[0], "SUBSTR"), whole(args[1], "SUBSTR")
    end = whole(args[2], "SUBSTR") if len(args) > 2 else -1
    if start < 0 or (end != -1 and end < start):
        raise invalid(
            f"SUBSTR: range {start} to {end} is not valid", hint="positions count from 0, the end is exclusive"
        )
    if end == -1:
        return Bound(f"substr({text}, {start + 1})", _STRING)
    return Bound(f"substr({text}, {start + 1}, {end - start})", _STRING)


def _substring(args: Args) -> Bound:
    """SUBSTRING(s, start[, length]): standard SQL's, positions from 1."""
    text, start = text_arg(args[0], "SUBSTRING"), whole(args[1], "SUBSTRING")
    if len(args) == 2:
        return Bound(f"substr({text}, {max(start, 1)})", _STRING)
    length = whole(args[2], "SUBSTRING")
    if length < 0:
        raise invalid(f"SUBSTRING: length {length} is negative")
    return Bound(f"substr({text}, {start}, {length})", _STRING)


def _concat(args: Args) -> Bound:
    """CONCAT(a, b[, separator])."""
    left, right = text_arg(args[0], "CONCAT"), text_arg(args[1], "CONCAT")
    middle = f" || {text_arg(args[2], 'CONCAT')}" if len(args) > 2 else ""
    return Bound(f"({left}{middle} || {right})", _STRING)


def _concat_ws(args: Args) -> Bound:
    """CONCAT_WS(separator, a, b...): NULLs are left out."""
    return Bound(f"concat_ws({', '.join(text_arg(arg, 'CONCAT_WS') for arg in args)})", _STRING)


def _pad(side: str) -> Bind:
    def bind(args: Args) -> Bound:
        text, size = text_arg(args[0], side), whole(args[1], side)
        padding = literal_text(args[2], f"the padding of {side.upper()}")
        return Bound(f"fn_{side}({text}, {size}, {padding})", _STRING)

    return bind


def _trim(args: Args) -> Bound:
    """TRIM(s), or TRIM('BOTH', ' ', s) as TRIM(BOTH ' ' FROM s) is called."""
    if len(args) == 1:
        return Bound(f"btrim({text_arg(args[0], 'TRIM')}, {_BLANKS})", _STRING)
    if len(args) != 3:
        raise invalid("trim takes 1 argument or 3: TRIM(s), TRIM(BOTH 'x' FROM s)")
    side = {"BOTH": "btrim", "LEADING": "ltrim", "TRAILING": "rtrim"}.get(word(args[0], "the side of TRIM").upper())
    if side is None:
        raise invalid("TRIM: the side must be BOTH, LEADING or TRAILING")
    return Bound(f"{side}({text_arg(args[2], 'TRIM')}, {text_arg(args[1], 'TRIM')})", _STRING)


def _position(args: Args) -> Bound:
    """STRPOS(s, part[, n]): where `part` begins (for the n-th time), -1: nowhere."""
    text, part = text_arg(args[0], "STRPOS"), text_arg(args[1], "STRPOS")
    if len(args) == 2:
        return Bound(f"CAST(strpos({text}, {part}) - 1 AS INT)", _INT)
    word(args[1], "the part that STRPOS looks for the n-th time")
    nth = whole(args[2], "STRPOS")
    return Bound(f"fn_strpos_nth({text}, {part}, {nth})", _INT)


def _last_position(args: Args) -> Bound:
    word(args[1], "the part that STRRPOS looks for")
    start = str(whole(args[2], "STRRPOS")) if len(args) > 2 else "NULL"
    return Bound(f"fn_strrpos({text_arg(args[0], 'STRRPOS')}, {text_arg(args[1], 'STRRPOS')}, {start})", _INT)


def _side(name: str, function: str) -> Bind:
    """LEFTSUBSTR(s, n), RIGHTSUBSTR(s, n): a negative length gives the empty text."""
    return lambda args: Bound(f"{name}({text_arg(args[0], function)}, {max(0, whole(args[1], function))})", _STRING)


def _repeat(args: Args) -> Bound:
    """REPEAT(s, n), REPEAT(s, separator, n)."""
    separator = literal_text(args[1], "the separator of REPEAT") if len(args) > 2 else "''"
    return Bound(f"fn_repeat({text_arg(args[0], 'REPEAT')}, {separator}, {whole(args[-1], 'REPEAT')})", _STRING)


def _replace(args: Args) -> Bound:
    word(args[1], "what REPLACE looks for")
    new = text_arg(args[2], "REPLACE")
    word(args[2], "what REPLACE puts in its place")
    return Bound(f"fn_replace({text_arg(args[0], 'REPLACE')}, {text_arg(args[1], 'REPLACE')}, {new})", _STRING)


def _remove(args: Args) -> Bound:
    word(args[1], "what REMOVE looks for")
    return Bound(f"fn_replace({text_arg(args[0], 'REMOVE')}, {text_arg(args[1], 'REMOVE')}, '')", _STRING)


def _split(args: Args) -> Bound:
    """SPLIT(s, separator[, limit]): a multi-value STRING."""
    limit = whole(args[2], "SPLIT") if len(args) > 2 else 0
    sign = text_sql(word(args[1], "the separator of SPLIT"))
    return Bound(f"fn_split({text_arg(args[0], 'SPLIT')}, {sign}, {limit})", _STRING, multi=True)


def _split_part(args: Args) -> Bound:
    """SPLITPART(s, separator[, limit], index)."""
    limit = whole(args[2], "SPLITPART") if len(args) > 3 else 0
    sign = text_sql(word(args[1], "the separator of SPLITPART"))
    index = whole(args[-1], "SPLITPART")
    return Bound(f"fn_split_part({text_arg(args[0], 'SPLITPART')}, {sign}, {limit}, {index})", _STRING)


def _regexp_extract(args: Args) -> Bound:
    """REGEXPEXTRACT(s, expression[, group[, default]]): group 0 is the whole match; no match gives the default ('')."""
    pattern = JavaPattern(word(args[1], "the expression of REGEXP_EXTRACT"))
    group = whole(args[2], "REGEXP_EXTRACT") if len(args) > 2 else 0
    default = text_sql(word(args[3], "the default of REGEXP_EXTRACT")) if len(args) > 3 else "''"
    text = text_arg(args[0], "REGEXP_EXTRACT")
    if not 0 <= group <= pattern.groups:
        return Bound(f"CASE WHEN {text} IS NOT NULL THEN {default} END", _STRING)
    return Bound(f"fn_regexp_extract({text}, {text_sql(pattern.re2_group(group))}, {default})", _STRING)


def _regexp_replace(args: Args) -> Bound:
    """REGEXPREPLACE(s, expression, replacement[, from[, occurrence[, flags]]]): all occurrences by default (-1)."""
    flags = word(args[5], "the flags of REGEXP_REPLACE") if len(args) > 5 else ""
    if flags not in ("", "i"):
        raise invalid(f"REGEXP_REPLACE: flags {flags!r} are not supported", hint="'' or 'i'")
    pattern = JavaPattern(word(args[1], "the expression of REGEXP_REPLACE"))
    new = replacement(word(args[2], "the replacement of REGEXP_REPLACE"), pattern.groups)
    start = whole(args[3], "REGEXP_REPLACE") if len(args) > 3 else 0
    occurrence = whole(args[4], "REGEXP_REPLACE") if len(args) > 4 else -1
    if occurrence > 0:
        raise invalid("REGEXP_REPLACE: an occurrence other than 0 (the first) and -1 (all) is not supported")
    regex = text_sql(("(?i)" if flags == "i" else "") + pattern.re2())
    most = 1 if occurrence == 0 else -1
    text = text_arg(args[0], "REGEXP_REPLACE")
    return Bound(f"fn_regexp_replace({text}, {regex}, {text_sql(new)}, {start}, {most})", _STRING)


def _normalize(args: Args) -> Bound:
    form = word(args[1], "the form of NORMALIZE").upper() if len(args) > 1 else "NFC"
    if form not in ("NFC", "NFD", "NFKC", "NFKD"):
        raise invalid(f"NORMALIZE: unknown form {form!r}", hint="NFC, NFD, NFKC, NFKD")
    return Bound(f"fn_normalize({text_arg(args[0], 'NORMALIZE')}, '{form}')", _STRING)


def _chr(args: Args) -> Bound:
    return Bound(f"chr({integer_arg(args[0], 'CHR')})", _STRING)


TEXTS_AND_BYTES: tuple[Scalar, ...] = (
    Scalar(("upper",), (1, 1), _string("upper({0})", "UPPER")),
    Scalar(("lower",), (1, 1), _string("lower({0})", "LOWER")),
    Scalar(("initcap",), (1, 1), _string("initcap({0})", "INITCAP")),
    Scalar(("length", "charlength", "strlen"), (1, 1), _string("CAST(length({0}) AS INT)", "LENGTH", _INT)),
    Scalar(("trim",), (1, 3), _trim),
    Scalar(("ltrim",), (1, 1), _string(f"ltrim({{0}}, {_SPACES})", "LTRIM")),
    Scalar(("rtrim",), (1, 1), _string(f"rtrim({{0}}, {_SPACES})", "RTRIM")),
    Scalar(("reverse",), (1, 1), _string("reverse({0})", "REVERSE")),
    Scalar(("replace",), (3, 3), _replace),
    Scalar(("remove",), (2, 2), _remove),
    Scalar(("strpos",), (2, 3), _position),
    Scalar(("strrpos",), (2, 3), _last_position),
    Scalar(("startswith",), (2, 2), _string("starts_with({0}, {1})", "STARTSWITH", _BOOLEAN)),
    Scalar(("endswith",), (2, 2), _string("ends_with({0}, {1})", "ENDSWITH", _BOOLEAN)),
    Scalar(("contains",), (2, 2), _string("contains({0}, {1})", "CONTAINS", _BOOLEAN)),
    Scalar(("lpad",), (3, 3), _pad("lpad")),
    Scalar(("rpad",), (3, 3), _pad("rpad")),
    Scalar(("substr",), (2, 3), _substr),
    Scalar(("substring",), (2, 3), _substring),
    Scalar(("leftsubstr", "left"), (2, 2), _side("left", "LEFTSUBSTR")),
    Scalar(("rightsubstr", "right"), (2, 2), _side("right", "RIGHTSUBSTR")),
    Scalar(("concat",), (2, 3), _concat),
    Scalar(("concatws",), (2, 64), _concat_ws),
    Scalar(("repeat",), (2, 3), _repeat),
    Scalar(("split", "stringtoarray"), (2, 3), _split),
    Scalar(("splitpart",), (3, 4), _split_part),
    Scalar(("codepoint",), (1, 1), _string("ascii({0})", "CODEPOINT", _INT)),
    Scalar(("chr",), (1, 1), _chr),
    Scalar(("strcmp",), (2, 2), _string("fn_strcmp({0}, {1})", "STRCMP", _INT)),
    Scalar(("hammingdistance",), (2, 2), _string("fn_hamming({0}, {1})", "HAMMINGDISTANCE", _INT)),
    Scalar(
        ("levenshteindistance",),
        (2, 2),
        _string("CAST(levenshtein(fn_comparable({0}, {1}), {1}) AS INT)", "LEVENSHTEINDISTANCE", _INT),
    ),
    Scalar(("normalize",), (1, 2), _normalize),
    Scalar(("regexpextract",), (2, 4), _regexp_extract),
    Scalar(("regexpreplace",), (3, 6), _regexp_replace),
    Scalar(("encodeurl",), (1, 1), _string("fn_encode_url({0})", "ENCODEURL")),
    Scalar(("decodeurl",), (1, 1), _string("fn_decode_url({0})", "DECODEURL")),
    Scalar(("tobase64",), (1, 1), _string("fn_to_base64({0})", "TOBASE64")),
    Scalar(("frombase64",), (1, 1), _string("fn_from_base64({0})", "FROMBASE64")),
    Scalar(("toutf8",), (1, 1), _string("fn_to_utf8({0})", "TOUTF8", _BYTES)),
    Scalar(("toascii",), (1, 1), _string("fn_to_ascii({0})", "TOASCII", _BYTES)),
    Scalar(("fromutf8",), (1, 1), _of_bytes("fn_from_utf8", "FROMUTF8")),
    Scalar(("fromascii",), (1, 1), _of_bytes("fn_from_ascii", "FROMASCII")),
    Scalar(("hextobytes",), (1, 1), _string("fn_hex_to_bytes({0})", "HEXTOBYTES", _BYTES)),
    Scalar(("bytestohex",), (1, 1), _of_bytes("fn_bytes_to_hex", "BYTESTOHEX")),
    Scalar(("base64encode", "bytestobase64", "binarytobase64"), (1, 1), _of_bytes("fn_bytes_base64", "BASE64ENCODE")),
    Scalar(("base64decode",), (1, 1), _string("fn_base64_bytes({0})", "BASE64DECODE", _BYTES)),
    Scalar(("sha",), (1, 1), _of_bytes("fn_sha1", "SHA")),
    *(Scalar((name,), (1, 1), _of_bytes(f"fn_{name}", name.upper())) for name in ("md5", "sha224", "sha256", "sha512")),
    Scalar(("crc32",), (1, 1), _of_bytes("fn_crc32", "CRC32", _INT)),
    Scalar(("adler32",), (1, 1), _of_bytes("fn_adler32", "ADLER32", _INT)),
    Scalar(("murmurhash2",), (1, 1), _of_bytes("fn_murmur2", "MURMURHASH2", _INT)),
)
