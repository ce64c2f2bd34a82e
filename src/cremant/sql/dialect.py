# SPDX-License-Identifier: Apache-2.0
"""Pinot's SQL text -> statements: the grammar, and the options that travel inside the text.

Grammar: identifiers in double quotes or backticks, strings in single quotes (`''` escapes), names keep their case,
function names ignore case and underscores, an alias may be a single-quoted string, `LIMIT offset, n`, a trailing `;`.
Every function parses to a plain call: what exists is decided by the function tables, not by the parser.

Options: `SET key = value;` before or after the query, and a trailing `OPTION(key=value, ...)`. SET wins over OPTION,
OPTION over the request's `queryOptions` string. Keys that nobody knows are kept and ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from sqlglot import exp
from sqlglot.dialects.dialect import Dialect
from sqlglot.errors import ParseError, TokenError
from sqlglot.parser import Parser
from sqlglot.tokenizer_core import Token, TokenType
from sqlglot.tokens import Tokenizer

from cremant.model.errors import QueryError
from cremant.model.limits import QUERY_TEXT_CHARS_MAX
from cremant.model.query_codes import QueryCode


class PinotTokenizer(Tokenizer):
    QUOTES: ClassVar[list[Any]] = ["'"]
    IDENTIFIERS: ClassVar[list[Any]] = ['"', "`"]


class PinotParser(Parser):
    FUNCTIONS: ClassVar[dict[str, Any]] = {}
    NO_PAREN_FUNCTIONS: ClassVar[dict[Any, Any]] = {}
    NO_PAREN_FUNCTION_PARSERS: ClassVar[dict[str, Any]] = {"CASE": Parser.NO_PAREN_FUNCTION_PARSERS["CASE"]}
    FUNCTIONS_WITH_ALIASED_ARGS: ClassVar[set[str]] = set()
    FUNCTION_PARSERS: ClassVar[dict[str, Any]] = {
        "CAST": lambda self: _parse_cast(self),
        "EXTRACT": lambda self: _parse_extract(self),
    }


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


@dataclass(frozen=True, slots=True)
class Statement:
    """One query of a text. `tree` is sqlglot's; `options` are those of the text, keys as written."""

    tree: Any
    options: dict[str, str]


_dialect = Pinot()


def parse(text: str) -> Statement:
    """Raises QueryError 150 that says where and what."""
    if len(text) > QUERY_TEXT_CHARS_MAX:
        raise QueryError(
            QueryCode.SQL_PARSING,
            f"SQLParsingError: the query has {len(text)} characters, at most {QUERY_TEXT_CHARS_MAX} are allowed",
            hint="shorten its lists",
        )
    try:
        return _parse(text)
    except (ParseError, TokenError) as error:
        raise parsing_error(text, _explain(error)) from error
    except RecursionError as error:
        raise parsing_error(text, "the expressions are nested too deeply", hint="use fewer parentheses") from error


def parsing_error(text: str, what: str, *, hint: str = "") -> QueryError:
    shown = text if len(text) <= 200 else text[:200] + "..."
    message = f"SQLParsingError: Caught exception while parsing query: {shown}: {what}"
    return QueryError(QueryCode.SQL_PARSING, message, hint=hint)


def _explain(error: ParseError | TokenError) -> str:
    if isinstance(error, ParseError) and error.errors:
        first = error.errors[0]
        near = f" near {first['highlight']!r}" if first.get("highlight") else ""
        what = first["description"]
        if what.startswith("Required keyword"):
            what = "Something is missing"
        return f"{what.split(' but got <Token')[0]}{near} at line {first['line']}, column {first['col']}"
    return str(error).split("\n")[0]


def _parse(text: str) -> Statement:
    set_options: dict[str, str] = {}
    queries: list[list[Token]] = []
    for tokens in _statements(_dialect.tokenize(text)):
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
    if not tokens or tokens[0].token_type not in (TokenType.SELECT, TokenType.L_PAREN, TokenType.WITH):
        first = tokens[0].text.split()[0].upper() if tokens and tokens[0].text.split() else ""
        what = "Non-query expression encountered in illegal context"
        raise parsing_error(text, f"{what}: {first}", hint="only SELECT queries are answered")
    trees = _dialect.parser().parse(tokens, text)
    if len(trees) != 1 or trees[0] is None:
        raise parsing_error(text, "not a query")
    return Statement(trees[0], {**options, **set_options})


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
