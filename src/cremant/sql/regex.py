# SPDX-License-Identifier: Apache-2.0
"""Java's regular expressions -> the dialect that both engines take: Rust's `regex` (filters) and RE2 (kernels).

Both run in time linear in the text, which backtracking cannot promise; so what needs backtracking is refused here by
name: lookaround, backreferences, possessive and atomic groups. Made equal where they differ from Java:

    \\w \\d \\s \\b     ASCII, as in Java (Rust: Unicode)          (?<name>...)   (?P<name>...)
    \\h \\R \\Q..\\E     spelled out                                \\Z            end of text
    POSIX classes    \\p{Alpha}, \\p{Punct}... as ASCII sets      [a-z&&[^b]]   refused (RE2 has no intersections)

Left as they are: `.` does not match \\n (in Java also not \\r, U+0085, U+2028, U+2029); `(?i)` folds Unicode.
"""

from __future__ import annotations

from cremant.model.limits import KERNEL_LITERAL_CHARS_MAX
from cremant.sql.bound import invalid

_ASCII = {
    "w": "0-9A-Za-z_", "d": "0-9", "s": r" \t\n\x0B\f\r",
    "h": r" \t\x{A0}\x{1680}\x{180e}\x{2000}-\x{200a}\x{202f}\x{205f}\x{3000}",
}  # fmt: skip
_POSIX = {
    "Lower": "a-z", "Upper": "A-Z", "ASCII": r"\x00-\x7F", "Alpha": "A-Za-z", "Digit": "0-9", "Alnum": "0-9A-Za-z",
    "Punct": r"!-/:-@\[-`{-~", "Graph": "!-~", "Print": " -~", "Blank": r" \t", "Cntrl": r"\x00-\x1F\x7F",
    "XDigit": "0-9A-Fa-f", "Space": r" \t\n\x0B\f\r",
}  # fmt: skip
_CATEGORIES = {
    "IsAlphabetic": "L",
    "IsLetter": "L",
    "IsDigit": "Nd",
    "IsPunctuation": "P",
    "IsUppercase": "Lu",
    "IsLowercase": "Ll",
}
_WORD_BOUNDARY = {"b": r"(?-u:\b)", "B": r"(?-u:\B)"}


def refused(pattern: str, what: str) -> Exception:
    return invalid(
        f"regular expression {pattern[:200]!r}: {what} is not supported",
        hint="use only constructs that need no backtracking",
    )


class JavaPattern:
    """A translated pattern. `groups`: how many capturing groups it has."""

    def __init__(self, pattern: str) -> None:
        if len(pattern) > KERNEL_LITERAL_CHARS_MAX:
            raise invalid(
                f"a regular expression of {len(pattern)} characters, at most {KERNEL_LITERAL_CHARS_MAX} are allowed"
            )
        self.source = pattern
        self.groups = 0
        self._parts: list[str] = []
        #: Places in `_parts` that open a capturing group.
        self._opened: list[int] = []
        self._at = 0
        self._depth = 0
        while self._at < len(pattern):
            self._next()
        if self._depth:
            raise invalid(f"regular expression {pattern[:200]!r}: a group is not closed")

    def rust(self) -> str:
        """For DataFusion's regexp_like."""
        return "".join(self._parts)

    def re2(self) -> str:
        r"""For Arrow's kernels. RE2's \b is ASCII anyhow."""
        text = "".join(self._parts)
        for short, spelled in _WORD_BOUNDARY.items():
            text = text.replace(spelled, "\\" + short)
        return text

    def re2_group(self, group: int) -> str:
        """RE2 with `group` named `g` and no other group captured; group 0 is everything."""
        parts = list(self._parts)
        for number, place in enumerate(self._opened, 1):
            parts[place] = "(?P<g>" if number == group else "(?:"
        text = "".join(parts)
        for short, spelled in _WORD_BOUNDARY.items():
            text = text.replace(spelled, "\\" + short)
        return f"(?P<g>{text})" if group == 0 else text

    def _next(self) -> None:
        match self.source[self._at]:
            case "\\":
                self._escape(inside=False)
            case "[":
                self._parts.append(self._set())
            case "(":
                self._group()
            case ")":
                self._depth -= 1
                if self._depth < 0:
                    raise invalid(f"regular expression {self.source[:200]!r}: a ) without its (")
                self._plain()
            case "*" | "+" | "?" | "}" if self._at + 1 < len(self.source) and self.source[self._at + 1] == "+":
                raise refused(self.source, f"the possessive {self.source[self._at : self._at + 2]}")
            case "{" if not self.source[self._at + 1 : self._at + 2].isdigit():
                raise invalid(f"regular expression {self.source[:200]!r}: a {{ that repeats nothing", hint="write \\{")
            case _:
                self._plain()

    def _plain(self) -> None:
        self._parts.append(self.source[self._at])
        self._at += 1

    def _group(self) -> None:
        rest = self.source[self._at : self._at + 4]
        self._depth += 1
        for opening, what in (
            ("(?=", "lookahead"),
            ("(?!", "lookahead"),
            ("(?<=", "lookbehind"),
            ("(?<!", "lookbehind"),
            ("(?>", "an atomic group"),
        ):
            if rest.startswith(opening):
                raise refused(self.source, f"{what} {opening}...)")
        if rest.startswith("(?<"):
            end = self.source.find(">", self._at)
            if end < 0:
                raise invalid(f"regular expression {self.source[:200]!r}: the name of a group is not closed")
            self._open(f"(?P<{self.source[self._at + 3 : end]}>")
            self._at = end + 1
        elif rest.startswith("(?"):
            self._plain()
        else:
            self._open("(")
            self._at += 1

    def _open(self, text: str) -> None:
        self.groups += 1
        self._opened.append(len(self._parts))
        self._parts.append(text)

    def _escape(self, *, inside: bool) -> None:
        """At a backslash; `inside` of a set the brackets of a set are left out."""
        source = self.source
        if self._at + 1 >= len(source):
            raise invalid(f"regular expression {source[:200]!r}: ends with a backslash")
        letter = source[self._at + 1]
        self._at += 2
        if letter in _ASCII:
            self._parts.append(_ASCII[letter] if inside else f"[{_ASCII[letter]}]")
        elif letter.lower() in _ASCII:
            if inside:
                raise refused(source, f"\\{letter} inside of [...]")
            self._parts.append(f"[^{_ASCII[letter.lower()]}]")
        elif letter in _WORD_BOUNDARY and not inside:
            self._parts.append(_WORD_BOUNDARY[letter])
        elif (letter.isdigit() and letter != "0") or letter == "k":
            raise refused(source, f"the backreference \\{letter}")
        elif letter == "Q":
            end = source.find("\\E", self._at)
            end = len(source) if end < 0 else end
            self._parts += [
                "\\" + c if not c.isalnum() and c.isascii() and c > " " else c for c in source[self._at : end]
            ]
            self._at = min(end + 2, len(source))
        elif letter in "pP":
            self._property(letter, inside=inside)
        elif letter == "u":
            self._parts.append(f"\\x{{{source[self._at : self._at + 4]}}}")
            self._at += 4
        else:
            self._parts.append(_OTHERS.get(letter) or f"\\{letter}")
            if letter in "GXNC" or (letter == "R" and inside):
                raise refused(source, f"\\{letter}")

    def _property(self, letter: str, *, inside: bool) -> None:
        source = self.source
        end = source.find("}", self._at) if source[self._at : self._at + 1] == "{" else self._at
        name = source[self._at + 1 : end] if end > self._at else source[self._at : self._at + 1]
        self._at = end + 1
        if name in _POSIX:
            if inside and letter == "P":
                raise refused(source, f"\\P{{{name}}} inside of [...]")
            self._parts.append(_POSIX[name] if inside else f"[{'^' if letter == 'P' else ''}{_POSIX[name]}]")
        else:
            plain = _CATEGORIES.get(name, name.removeprefix("Is"))
            self._parts.append(f"\\{letter}{{{plain}}}")

    def _set(self) -> str:
        """[...] from its bracket; sets inside of sets and intersections are refused."""
        outer, self._parts = self._parts, []
        self._parts.append("[")
        self._at += 1
        if self.source[self._at : self._at + 1] == "^":
            self._plain()
        if self.source[self._at : self._at + 1] == "]":
            self._parts.append("\\]")
            self._at += 1
        while self._at < len(self.source) and self.source[self._at] != "]":
            if self.source[self._at] == "\\":
                self._escape(inside=True)
            elif self.source[self._at] == "[":
                raise refused(self.source, "a set inside of a set")
            elif self.source.startswith("&&", self._at):
                raise refused(self.source, "an intersection && of sets")
            elif self.source.startswith(("--", "~~"), self._at):
                self._parts.append("\\" + self.source[self._at])
                self._at += 1
            else:
                self._plain()
        if self._at >= len(self.source):
            raise invalid(f"regular expression {self.source[:200]!r}: a [ is not closed")
        self._plain()
        text = "".join(self._parts)
        self._parts = outer
        return text


#: Escapes that the engines spell differently; and characters that need none (Java lets one escape them all the same).
_OTHERS = {"Z": r"\z", "e": r"\x1B", "R": r"(?:\r\n|[\n\x0B\f\r\x{85}\x{2028}\x{2029}])"}
_OTHERS |= {letter: letter for letter in "/'\" _<>%@!=,:;`"}


def replacement(text: str, groups: int) -> str:
    r"""Java's replacement (`$1`, `\$`) as RE2's (`\1`)."""
    parts: list[str] = []
    at = 0
    while at < len(text):
        letter = text[at]
        if letter == "\\" and at + 1 < len(text):
            parts.append("\\\\" if text[at + 1] == "\\" else text[at + 1])
            at += 2
        elif letter == "$":
            number = text[at + 1 : at + 2]
            if not number.isascii() or not number.isdigit():
                raise invalid(
                    f"REGEXP_REPLACE: $ in the replacement {text[:100]!r} names no group", hint="write \\$ for a $"
                )
            if int(number) > groups:
                raise invalid(f"REGEXP_REPLACE: the expression has no group {number}")
            parts.append("\\" + number)
            at += 2
        else:
            parts.append("\\\\" if letter == "\\" else letter)
            at += 1
    return "".join(parts)
