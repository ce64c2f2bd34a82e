# SPDX-License-Identifier: Apache-2.0
"""Pinot's SQL text -> statements: the grammar, and the options that travel inside the text.

Grammar: identifiers in double quotes or backticks, strings in single quotes (`''` escapes), names keep their case,
function names ignore case and underscores, an alias may be a single-quoted string, `LIMIT offset, n`, a trailing `;`.
Every function parses to a plain call: what exists is decided by the function tables, not by the parser.

Options: `SET key = value;` before or after the query, and a trailing `OPTION(key=value, ...)`. SET wins over OPTION,
OPTION over the request's `queryOptions` string. Keys that nobody knows are kept and ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from sqlglot import exp
from sqlglot.dialects.dialect import Dialect
from sqlglot.errors import ParseError, TokenError
from sqlglot.parser import Parser
from sqlglot.tokenizer_core import Token, TokenType
from sqlglot.tokens import Tokenizer

from cremant.model.errors import QueryError
from cremant.model.limits import QUERY_TEXT_CHARS_MAX, QUERY_WORDS_MAX
from cremant.model.query_codes import QueryCode
from cremant.sql.ir import Explain


class PinotTokenizer(Tokenizer):
    QUOTES: ClassVar[list[Any]] = ["'"]
    IDENTIFIERS: ClassVar[list[Any]] = ['"', "`"]
    #: `div` is a function.
    KEYWORDS: ClassVar[dict[str, Any]] = {word: kind for word, kind in Tokenizer.KEYWORDS.items() if word != "DIV"}
    #: No word swallows the rest of the text.
    COMMANDS: ClassVar[set[Any]] = set()


class LiteralList(exp.Expression):
    """The values of a long IN: `values` is a tuple of (text, is_string), far cheaper than one node each."""

    arg_types: ClassVar[dict[str, bool]] = {"values": True}


class PinotParser(Parser):
    FUNCTIONS: ClassVar[dict[str, Any]] = {}
    NO_PAREN_FUNCTIONS: ClassVar[dict[Any, Any]] = {}
    NO_PAREN_FUNCTION_PARSERS: ClassVar[dict[str, Any]] = {"CASE": Parser.NO_PAREN_FUNCTION_PARSERS["CASE"]}
    FUNCTIONS_WITH_ALIASED_ARGS: ClassVar[set[str]] = set()
    FUNCTION_PARSERS: ClassVar[dict[str, Any]] = {
        "CAST": lambda self: _parse_cast(self),
        "EXTRACT": lambda self: _parse_extract(self),
        "TRIM": lambda self: _parse_trim(self),
    }

    def _parse_in(self, this: Any, alias: bool = False) -> Any:
        found = _literal_list(self._tokens, self._index) if self._curr is not None else None
        if found is None:
            return super()._parse_in(this, alias=alias)
        values, length = found
        self._advance(length)
        return exp.In(this=this, expressions=[LiteralList(values=values)])


def _literal_list(tokens: Sequence[Token], at: int) -> tuple[tuple[tuple[str, bool], ...], int] | None:
    """The values of `( literal, literal, ... )` at a token, and how many tokens that is; None if it is not one."""
    if at >= len(tokens) or tokens[at].token_type != TokenType.L_PAREN:
        return None
    values: list[tuple[str, bool]] = []
    place = at + 1
    while place + 1 < len(tokens):
        token, sign = tokens[place], ""
        if token.token_type == TokenType.DASH:
            place += 1
            token, sign = tokens[place], "-"
        if token.token_type == TokenType.NUMBER:
            values.append((sign + token.text, False))
        elif token.token_type == TokenType.STRING and not sign:
            values.append((token.text, True))
        else:
            return None
        place += 1
        if place >= len(tokens):
            return None
        if tokens[place].token_type == TokenType.R_PAREN:
            return tuple(values), place + 1 - at
        if tokens[place].token_type != TokenType.COMMA:
            return None
        place += 1
    return None


class Pinot(Dialect):
    #: NULLs sort last ascending, first descending.
    NULL_ORDERING = "nulls_are_large"
    Tokenizer = PinotTokenizer
    Parser = PinotParser


def _parse_cast(parser: Any) -> exp.Expression:
    """CAST(x AS any words) -> cast(x, 'ANY WORDS'): Pinot's type names, kept as written."""
    value = parser._parse_disjunction()
    if not parser._match(TokenType.ALIAS):
        parser.raise_error("Expected AS in CAST")
    words = []
    while parser._curr and parser._curr.token_type != TokenType.R_PAREN:
        words.append(parser._curr.text.upper())
        parser._advance()
    return exp.Anonymous(this="cast", expressions=[value, exp.Literal.string(" ".join(words))])


def _parse_extract(parser: Any) -> exp.Expression:
    unit = parser._curr.text if parser._curr else ""
    parser._advance()
    if not parser._match(TokenType.FROM):
        parser.raise_error("Expected FROM in EXTRACT")
    value = parser._parse_disjunction()
    return exp.Anonymous(this="extract", expressions=[exp.Literal.string(unit.upper()), value])


def _parse_trim(parser: Any) -> exp.Expression:
    """TRIM([BOTH|LEADING|TRAILING] [characters FROM] x) -> trim('BOTH', ' ', x): Calcite's name for all of them."""
    side, characters = "BOTH", exp.Literal.string(" ")
    if parser._curr and not _is_text(parser._curr) and parser._curr.text.upper() in ("BOTH", "LEADING", "TRAILING"):
        side = parser._curr.text.upper()
        parser._advance()
    value = None if parser._match(TokenType.FROM) else parser._parse_disjunction()
    if value is None or parser._match(TokenType.FROM):
        characters = value if value is not None else characters
        value = parser._parse_disjunction()
    return exp.Anonymous(this="trim", expressions=[exp.Literal.string(side), characters, value])


def _is_text(token: Token) -> bool:
    return bool(token.token_type == TokenType.STRING)


@dataclass(frozen=True, slots=True)
class Statement:
    """One query of a text. `tree` is sqlglot's; `options` are those of the text, keys as written. `explain`: what the
    text asks of it by beginning with EXPLAIN."""

    tree: Any
    options: dict[str, str]
    explain: Explain | None = None


_dialect = Pinot()
R = TypeVar("R")
_LIST_TOKENS = frozenset({TokenType.NUMBER, TokenType.STRING, TokenType.COMMA, TokenType.DASH})


def parse(text: str) -> Statement:
    """Raises QueryError 150 that says where and what."""
    return _read(text, _parse)


def parse_condition(text: str) -> Any:
    """The tree of a text that is one condition and nothing else. Raises QueryError 150 that says where and what."""
    return _read(text, _parse_condition)


def _read(text: str, parse_text: Callable[[str], R]) -> R:
    check_characters(text, "the query")
    if len(text) > QUERY_TEXT_CHARS_MAX:
        raise QueryError(
            QueryCode.SQL_PARSING,
            f"SQLParsingError: the query has {len(text)} characters, at most {QUERY_TEXT_CHARS_MAX} are allowed",
            hint="shorten its lists",
        )
    try:
        return parse_text(text)
    except (ParseError, TokenError) as error:
        raise parsing_error(text, _explain(text, error)) from error
    except RecursionError as error:
        raise parsing_error(text, "the expressions are nested too deeply", hint="use fewer parentheses") from error


def check_characters(text: str, what: str) -> None:
    """Raises QueryError 150 for half of a surrogate pair: JSON can spell it, no table, engine or answer can hold it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown, at = text.encode(errors="replace").decode(), error.start
        line, column = shown.count("\n", 0, at) + 1, at - shown.rfind("\n", 0, at)
        raise QueryError(
            QueryCode.SQL_PARSING,
            f"SQLParsingError: {what} has half of a surrogate pair, \\u{ord(text[at]):04x}, at line {line}, "
            f"column {column}{caret(shown, line, column)}\n",
            hint="send the character itself, or both halves of it",
        ) from error


def parsing_error(text: str, what: str, *, hint: str = "") -> QueryError:
    shown = text if len(text) <= 200 else text[:200] + "..."
    message = f"SQLParsingError: Caught exception while parsing query: {shown}: {what}"
    return QueryError(QueryCode.SQL_PARSING, message, hint=hint)


def _explain(text: str, error: ParseError | TokenError) -> str:
    if isinstance(error, ParseError) and error.errors:
        first = error.errors[0]
        near = f" near {first['highlight']!r}" if first.get("highlight") else ""
        what = first["description"]
        if what.startswith("Required keyword"):
            what = "Something is missing"
        line, column = int(first["line"] or 1), int(first["col"] or 1)
        what = f"{what.split(' but got <Token')[0]}{near} at line {line}, column {column}"
        return what + caret(text, line, max(1, column - len(first.get("highlight") or " ") + 1))
    opened = _unclosed(text)
    if opened is not None:
        what, at = opened
        line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
        return f"{what} opened at line {line}, column {column} is not closed{caret(text, line, column)}"
    return str(error).split("\n")[0]


def caret(text: str, line: int, column: int) -> str:
    """The line of a text with a mark below a column (from 1), as two more lines of a message."""
    lines = text.split("\n")
    if not 1 <= line <= len(lines):
        return ""
    shown, start = lines[line - 1].rstrip("\r"), max(0, column - _CARET_BEFORE)
    part = shown[start : start + _CARET_WIDTH].replace("\t", " ")
    return f"\n  {part}\n  {' ' * (column - 1 - start)}^"


#: How much of a long line is shown, and how much of it before the mark.
_CARET_WIDTH, _CARET_BEFORE = 120, 80


def _unclosed(text: str) -> tuple[str, int] | None:
    """What kind of quote or comment is still open at the end, and where it begins."""
    at = 0
    while at < len(text):
        if text[at] in "'\"`":
            end = text.find(text[at], at + 1)
            if end < 0:
                return f"the quote {text[at]}", at
            at = end
        elif text.startswith("--", at):
            at = text.find("\n", at)
            if at < 0:
                return None
        elif text.startswith("/*", at):
            end = text.find("*/", at + 2)
            if end < 0:
                return "the comment /*", at
            at = end + 1
        at += 1
    return None


def _parse(text: str) -> Statement:
    set_options: dict[str, str] = {}
    queries: list[list[Token]] = []
    for tokens in _statements(tokens_of(text)):
        if tokens[0].text.upper() == "SET":
            key, value = _set_option(text, tokens)
            set_options[key] = value
        else:
            queries.append(tokens)
    if not queries:
        raise parsing_error(text, "SqlNode with executable statement not found!", hint="write a SELECT")
    if len(queries) > 1:
        raise parsing_error(text, "only one query per request", hint="send the queries one by one")
    tokens, options = _without_option_clause(text, queries[0])
    tokens, explain = _without_explain(text, tokens)
    if not tokens or tokens[0].token_type not in (TokenType.SELECT, TokenType.L_PAREN, TokenType.WITH):
        first = tokens[0].text.split()[0].upper() if tokens and tokens[0].text.split() else ""
        what = "Non-query expression encountered in illegal context"
        raise parsing_error(text, f"{what}: {first}", hint="only SELECT queries are answered")
    trees = _dialect.parser().parse(tokens, text)
    if len(trees) != 1 or trees[0] is None:
        raise parsing_error(text, "not a query")
    return Statement(trees[0], {**options, **set_options}, explain)


def _parse_condition(text: str) -> Any:
    tokens = tokens_of(text)
    tree = _dialect.parser().parse_into(exp.Condition, tokens, text)[0] if tokens else None
    if tree is None:
        raise parsing_error(text, "there is no condition")
    return tree


def tokens_of(text: str) -> list[Token]:
    """Raises TokenError, and QueryError 700 for too many."""
    tokens: list[Token] = _dialect.tokenize(text)
    words = sum(token.token_type not in _LIST_TOKENS for token in tokens)
    if words > QUERY_WORDS_MAX:
        what = f"the query has {words} words and signs beside its literals, at most {QUERY_WORDS_MAX} are allowed"
        raise QueryError(QueryCode.QUERY_VALIDATION, what, hint="write lists of values with IN")
    return tokens


def _without_explain(text: str, tokens: list[Token]) -> tuple[list[Token], Explain | None]:
    """Cuts EXPLAIN PLAN [WITH|WITHOUT IMPLEMENTATION] FOR, or EXPLAIN FRESHNESS FOR, off."""
    words = [token.text.upper() for token in tokens[:5]]
    if words[:2] == ["EXPLAIN", "FRESHNESS"]:
        if words[2:3] != ["FOR"] or len(tokens) == 3:
            raise parsing_error(text, "expected EXPLAIN FRESHNESS FOR and a SELECT")
        return tokens[3:], Explain.FRESHNESS
    for length in (3, 5):
        if words[:2] == ["EXPLAIN", "PLAN"] and words[length - 1 : length] == ["FOR"]:
            return tokens[length:], Explain.PLAN
    if words[:1] == ["EXPLAIN"] and len(words) > 1:
        found = " ".join(token.text for token in tokens[1:3])
        raise parsing_error(text, f"EXPLAIN is followed by PLAN FOR or FRESHNESS FOR, and a SELECT; found {found!r}")
    return tokens, None


def _statements(tokens: Sequence[Token]) -> list[list[Token]]:
    found: list[list[Token]] = [[]]
    for token in tokens:
        if token.token_type == TokenType.SEMICOLON:
            found.append([])
        else:
            found[-1].append(token)
    return [statement for statement in found if statement]


def _set_option(text: str, tokens: list[Token]) -> tuple[str, str]:
    sign = next((i for i, token in enumerate(tokens) if token.token_type == TokenType.EQ), 0)
    key = "".join(token.text for token in tokens[1:sign])
    value = "".join(token.text for token in tokens[sign + 1 :])
    if sign < 2 or not key or sign + 1 >= len(tokens):
        raise parsing_error(text, f"SET at line {tokens[0].line} is not of the form SET key = value")
    return key, value


def _without_option_clause(text: str, tokens: list[Token]) -> tuple[list[Token], dict[str, str]]:
    """Cuts trailing `OPTION(...)` clauses off."""
    options: dict[str, str] = {}
    while tokens and tokens[-1].token_type == TokenType.R_PAREN:
        start = next((i for i in range(len(tokens) - 1, -1, -1) if tokens[i].token_type == TokenType.L_PAREN), 0)
        if start < 1 or tokens[start - 1].text.upper() != "OPTION":
            break
        inner = tokens[start + 1 : -1]
        parts: list[list[Token]] = [[]]
        for token in inner:
            if token.token_type == TokenType.COMMA:
                parts.append([])
            else:
                parts[-1].append(token)
        for part in parts:
            sign = next((i for i, token in enumerate(part) if token.token_type == TokenType.EQ), 0)
            if sign == 0 or sign == len(part) - 1:
                raise parsing_error(text, f"OPTION at line {tokens[start].line} is not of the form OPTION(key=value)")
            value = "".join(token.text for token in part[sign + 1 :])
            options.setdefault("".join(token.text for token in part[:sign]), value)
        tokens = tokens[: start - 1]
    return tokens, options


def json_options(text: str) -> dict[str, str]:
    """The request's `queryOptions`: `k=v;k2=v2`, empty parts ignored."""
    options: dict[str, str] = {}
    for part in text.split(";"):
        key, sign, value = part.partition("=")
        if sign and key.strip():
            options[key.strip()] = value.strip()
    return options
