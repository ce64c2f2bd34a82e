# SPDX-License-Identifier: Apache-2.0
"""The expression language of transforms and filters: Pinot's function calls plus SQL's infix operators, parsed.

    or < and < not < comparison, IN, BETWEEN, LIKE, IS NULL < + - < * / % < unary minus < call, CASE, CAST, (...)

Operators become calls (`a + b` is `plus(a, b)`), so there are three kinds of node. Function names are compared in lower
case without underscores, as Pinot does; column names exactly. 'text' is a literal, "name" a column.
"""

from __future__ import annotations

import re
from typing import NamedTuple, TypeAlias

from cremant.model.errors import InvalidConfig

DEPTH_MAX = 50
_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?![\w$])"
    r"|'(?P<text>(?:[^']|'')*)'"
    r'|"(?P<quoted>(?:[^"]|"")+)"'
    r"|(?P<word>[A-Za-z_$][\w$.]*)"
    r"|(?P<mark><>|!=|<=|>=|==|\|\||&&|[-+*/%(),<>=!]))"
)
_COMPARISONS = {
    "=": "equals", "==": "equals", "!=": "notequals", "<>": "notequals", "<": "lessthan", "<=": "lessthanorequal",
    ">": "greaterthan", ">=": "greaterthanorequal",
}  # fmt: skip
_SUMS = {"+": "plus", "-": "minus", "||": "concat"}
_PRODUCTS = {"*": "times", "/": "divide", "%": "mod"}


class Column(NamedTuple):
    name: str


class Literal(NamedTuple):
    value: str | int | float | bool | None


class Call(NamedTuple):
    """`name` is canonical; `written` is what the user wrote, for messages."""

    name: str
    args: tuple[Expression, ...]
    written: str


Expression: TypeAlias = Column | Literal | Call


class _Token(NamedTuple):
    kind: str
    text: str
    at: int

    @property
    def word(self) -> str:
        return self.text.upper() if self.kind == "word" else ""


def canonical(name: str) -> str:
    return name.replace("_", "").lower()


def parse_expression(text: str, where: str) -> Expression:
    """Raises InvalidConfig that points at the place."""
    if text.strip().lower().startswith("groovy("):
        raise InvalidConfig(
            f"{where}: Groovy is not supported by this version", hint="use the built-in transform functions"
        )
    return _Parser(text, where).parse()


class _Parser:
    def __init__(self, text: str, where: str) -> None:
        self._text = text
        self._where = where
        self._tokens = self._split(text)
        self._at = 0
        self._depth = 0

    def _split(self, text: str) -> list[_Token]:
        tokens = []
        at = 0
        while text[at:].strip():
            found = _TOKEN.match(text, at)
            if found is None or found.lastgroup is None:
                raise self._error(f"unexpected {text[at:].strip()[0]!r}", at)
            tokens.append(_Token(found.lastgroup, found[found.lastgroup], found.start(found.lastgroup)))
            at = found.end()
        tokens.append(_Token("end", "", len(text)))
        return tokens

    def _error(self, reason: str, at: int) -> InvalidConfig:
        return InvalidConfig(f"{self._where}: {reason} at character {at + 1} of {self._text!r}")

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _take(self) -> _Token:
        token = self._next
        self._at += 1
        return token

    def _accept(self, mark: str) -> bool:
        """Takes the next token if it is this mark or keyword."""
        token = self._next
        if (token.kind == "mark" and token.text == mark) or (token.word and token.word == mark):
            self._at += 1
            return True
        return False

    def _require(self, mark: str) -> None:
        if not self._accept(mark):
            found = self._next.text or "the end"
            raise self._error(f"expected {mark}, found {found}", self._next.at)

    def parse(self) -> Expression:
        expression = self._either()
        if self._next.kind != "end":
            raise self._error(f"unexpected {self._next.text!r}", self._next.at)
        return expression

    def _either(self) -> Expression:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise self._error(f"nested deeper than {DEPTH_MAX}", self._next.at)
        left = self._both()
        while self._accept("OR"):
            left = Call("or", (left, self._both()), "OR")
        self._depth -= 1
        return left

    def _both(self) -> Expression:
        left = self._negation()
        while self._accept("AND") or self._accept("&&"):
            left = Call("and", (left, self._negation()), "AND")
        return left

    def _negation(self) -> Expression:
        negations = 0
        while self._accept("NOT") or self._accept("!"):
            negations += 1
        inner = self._comparison()
        return Call("not", (inner,), "NOT") if negations % 2 else inner

    def _comparison(self) -> Expression:
        left = self._sum()
        while True:
            token = self._next
            if token.kind == "mark" and token.text in _COMPARISONS:
                self._at += 1
                left = Call(_COMPARISONS[token.text], (left, self._sum()), token.text)
            elif token.word in ("IN", "BETWEEN", "LIKE", "IS", "NOT"):
                left = self._predicate(left)
            else:
                return left

    def _predicate(self, left: Expression) -> Expression:
        if self._accept("IS"):
            name = "isnotnull" if self._accept("NOT") else "isnull"
            self._require("NULL")
            return Call(name, (left,), "IS NULL")
        negated = self._accept("NOT")
        if self._accept("IN"):
            self._require("(")
            inner = Call("in", (left, *self._list_until_close()), "IN")
        elif self._accept("BETWEEN"):
            low = self._sum()
            self._require("AND")
            inner = Call("between", (left, low, self._sum()), "BETWEEN")
        else:
            self._require("LIKE")
            inner = Call("like", (left, self._sum()), "LIKE")
        return Call("not", (inner,), "NOT") if negated else inner

    def _sum(self) -> Expression:
        left = self._product()
        while self._next.kind == "mark" and self._next.text in _SUMS:
            mark = self._take().text
            left = Call(_SUMS[mark], (left, self._product()), mark)
        return left

    def _product(self) -> Expression:
        left = self._unary()
        while self._next.kind == "mark" and self._next.text in _PRODUCTS:
            mark = self._take().text
            left = Call(_PRODUCTS[mark], (left, self._unary()), mark)
        return left

    def _unary(self) -> Expression:
        negative = False
        while self._next.kind == "mark" and self._next.text in "+-":
            negative ^= self._take().text == "-"
        inner = self._atom()
        if not negative:
            return inner
        if isinstance(inner, Literal) and isinstance(inner.value, (int, float)):
            return Literal(-inner.value)
        return Call("minus", (Literal(0), inner), "-")

    def _atom(self) -> Expression:
        token = self._take()
        match token.kind:
            case "number":
                return Literal(int(token.text) if token.text.isdigit() else float(token.text))
            case "text":
                return Literal(token.text.replace("''", "'"))
            case "quoted":
                return Column(token.text.replace('""', '"'))
            case "word":
                return self._word(token)
            case "mark" if token.text == "(":
                inner = self._either()
                self._require(")")
                return inner
            case _:
                raise self._error(f"unexpected {token.text or 'end'!r}", token.at)

    def _word(self, token: _Token) -> Expression:
        if token.word == "CASE":
            return self._case()
        if self._accept("("):
            if token.word == "CAST":
                return self._cast()
            return Call(canonical(token.text), tuple(self._list_until_close()), token.text)
        literals: dict[str, bool | None] = {"TRUE": True, "FALSE": False, "NULL": None}
        return Literal(literals[token.word]) if token.word in literals else Column(token.text)

    def _list_until_close(self) -> list[Expression]:
        if self._accept(")"):
            return []
        items = [self._either()]
        while self._accept(","):
            items.append(self._either())
        self._require(")")
        return items

    def _cast(self) -> Expression:
        value = self._either()
        if self._accept("AS"):
            kind: Expression = Literal(self._take().text)
        else:
            self._require(",")
            kind = self._either()
        self._require(")")
        return Call("cast", (value, kind), "CAST")

    def _case(self) -> Expression:
        """`CASE WHEN c THEN v ... ELSE e END` as case(c, v, ..., e)."""
        args: list[Expression] = []
        while self._accept("WHEN"):
            args.append(self._either())
            self._require("THEN")
            args.append(self._either())
        if not args:
            raise self._error("expected WHEN", self._next.at)
        args.append(self._either() if self._accept("ELSE") else Literal(None))
        self._require("END")
        return Call("case", tuple(args), "CASE")
