# SPDX-License-Identifier: Apache-2.0
"""Transforms and filter of a table, compiled: columns from columns, and which rows to drop.

Pinot's rules: a transform fills its column only where the message has no value for it; transforms may feed each other;
the filter is asked last and drops a record when it is true. Columns that expressions name but the schema does not have
are read from the message, with the type that their use asks for (several uses: as text). A row whose transform fails
is rejected, or with continueOnError keeps a missing cell; a filter that fails rejects, or with continueOnError keeps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cremant.ingest.coerce_columns import convert_column
from cremant.ingest.compile import Compiler, Computed
from cremant.ingest.evaluate import Kind, Value, either, to_kind, truth
from cremant.ingest.messages import work_type
from cremant.model.errors import InvalidConfig
from cremant.model.schema import FieldSpec, FieldType, Schema
from cremant.model.table import TableConfig, TransformConfig


@dataclass(frozen=True, slots=True)
class Derived:
    """Columns of the schema for the rows that stay: those at `keep` (None: all). `failures`: row and detail, ascending;
    `dropped`: rows that the filter dropped. All row numbers count the rows before."""

    columns: list[pa.Array]
    keep: np.ndarray | None
    failures: list[tuple[int, str]]
    dropped: np.ndarray


@dataclass(frozen=True, slots=True)
class _Step:
    """One transform: `field` is None for a column that only feeds others."""

    column: str
    field: FieldSpec | None
    function: str
    computed: Computed


class Derivation:
    """The compiled transforms and filter. `sources`: extra columns to decode behind the schema's own."""

    def __init__(
        self,
        schema: Schema,
        steps: tuple[_Step, ...],
        keep_filter: Computed | None,
        sources: tuple[FieldSpec, ...],
        *,
        keep_going: bool,
    ) -> None:
        self.sources = sources
        self._names = schema.column_names
        self._steps = steps
        self._filter = keep_filter
        self._keep_going = keep_going

    @property
    def is_identity(self) -> bool:
        return not self._steps and self._filter is None

    def run(self, columns: list[pa.Array], count: int) -> Derived:
        """`columns`: the schema's, then `sources`, nullable, in their working types."""
        names = (*self._names, *(source.name for source in self.sources))
        values = {name: Value(column) for name, column in zip(names, columns, strict=True)}
        failed = np.zeros(count, dtype=bool)
        details: dict[int, str] = {}
        for step in self._steps:
            value = self._fill(step, values, count)
            if value.failed is not None and not self._keep_going:
                for at in np.flatnonzero(value.failed & ~failed).tolist():
                    details[at] = f"column {step.column}: {step.function} cannot be computed"
                failed |= value.failed
            values[step.column] = Value(value.array)
        dropped = np.zeros(count, dtype=bool)
        if self._filter is not None:
            verdict = to_kind(self._filter.run(values, count), Kind.BOOLEAN)
            dropped = truth(verdict.array)
            if verdict.failed is not None:
                dropped &= ~verdict.failed
                if not self._keep_going:
                    for at in np.flatnonzero(verdict.failed & ~failed).tolist():
                        details[at] = "the filter function cannot be computed"
                    failed |= verdict.failed
            dropped &= ~failed
        keep = ~(failed | dropped)
        mine = [values[name].array for name in self._names]
        if keep.all():
            return Derived(mine, None, [], np.empty(0, dtype=np.int64))
        mask = pa.array(keep)
        return Derived([column.filter(mask) for column in mine], keep, sorted(details.items()), np.flatnonzero(dropped))

    def _fill(self, step: _Step, values: dict[str, Value], count: int) -> Value:
        """The step's column: what the message has, else what the function gives."""
        value = step.computed.run(values, count)
        if step.field is None:
            return value
        array, unfit = _into(step.field, value.array)
        failed = either(value.failed, unfit)
        present = values[step.column].array
        if failed is not None:
            failed = failed & ~truth(present.is_valid())
        if present.null_count == 0:
            return Value(present)
        if present.null_count < count:
            array = pc.if_else(present.is_valid(), present, array)
        return Value(array, failed)


def _into(field: FieldSpec, array: pa.Array) -> tuple[pa.Array, np.ndarray | None]:
    """What a transform gave, as cells of the field, and the rows that cannot be."""
    if not pa.types.is_list(array.type):
        converted = convert_column(_typed(array), field.data_type)
        return converted.array if field.single_value else _as_lists(converted.array), converted.failed
    items = convert_column(_typed(array.values), field.data_type)
    failed = None
    if items.failed is not None:
        failed = np.zeros(len(array), dtype=bool)
        failed[np.searchsorted(array.offsets.to_numpy(), np.flatnonzero(items.failed), side="right") - 1] = True
    mask = array.is_null() if array.null_count else None
    return pa.ListArray.from_arrays(array.offsets, items.array, type=work_type(field), mask=mask), failed


def _typed(array: pa.Array) -> pa.Array:
    return array.cast(pa.string()) if pa.types.is_null(array.type) else array


def _as_lists(array: pa.Array) -> pa.ListArray:
    offsets = np.concatenate(([0], np.cumsum(truth(array.is_valid()))))
    mask = array.is_null() if array.null_count else None
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), array.drop_null(), mask=mask)


def compile_derivation(schema: Schema, config: TableConfig, *, keep_going: bool) -> Derivation:
    """Raises InvalidConfig for what cannot be compiled."""
    transforms = _all_transforms(schema, config)
    known = {field.name: field for field in schema.fields}
    derived = frozenset(transform.column for transform in transforms) - known.keys()
    compiler = Compiler(known, derived, config.stream)
    steps: dict[str, tuple[_Step, frozenset[str]]] = {}
    for transform in transforms:
        where = f"transform of column {transform.column}"
        computed, reads = compiler.compile(transform.function, where)
        if transform.column in reads:
            raise InvalidConfig(
                f"Arguments of a transform function {sorted(reads)} cannot contain the destination column "
                f"'{transform.column}'"
            )
        _check_many(computed, known.get(transform.column), where)
        step = _Step(transform.column, known.get(transform.column), transform.function, computed)
        steps[transform.column] = (step, reads)
    keep_filter = compiler.compile(config.filter_function, "filterFunction")[0] if config.filter_function else None
    if keep_filter is not None and keep_filter.many:
        raise InvalidConfig("filterFunction: gives several values, expected true or false")
    sources = tuple(
        _source(name, kinds, many=name in compiler.undeclared_lists)
        for name, kinds in sorted(compiler.undeclared.items())
    )
    return Derivation(schema, _ordered(steps), keep_filter, sources, keep_going=keep_going)


def _all_transforms(schema: Schema, config: TableConfig) -> list[TransformConfig]:
    """The config's, then those that old schemas carry in their field specs."""
    transforms = list(config.transforms)
    for field in schema.fields:
        function = field.extra.get("transformFunction")
        if function and all(transform.column != field.name for transform in transforms):
            transforms.append(TransformConfig(column=field.name, function=str(function)))
    return transforms


def _check_many(computed: Computed, field: FieldSpec | None, where: str) -> None:
    if computed.many and (field is None or field.single_value):
        what = "is not in the schema" if field is None else "is single-value"
        raise InvalidConfig(f"{where}: gives several values, but the column {what}")


def _source(name: str, kinds: set[Kind], *, many: bool) -> FieldSpec:
    kind = next(iter(kinds)) if len(kinds) == 1 else Kind.STRING
    return FieldSpec(name=name, data_type=kind.value, field_type=FieldType.DIMENSION, single_value=not many)


def _ordered(steps: dict[str, tuple[_Step, frozenset[str]]]) -> tuple[_Step, ...]:
    """Each step after those whose columns it reads. Raises InvalidConfig for a cycle."""
    ordered: list[_Step] = []
    done: set[str] = set()
    while len(done) < len(steps):
        ready = [name for name, (_, reads) in steps.items() if name not in done and not (reads & steps.keys() - done)]
        if not ready:
            raise InvalidConfig(f"Expression cycle found in transforms of columns {sorted(steps.keys() - done)}")
        ordered += [steps[name][0] for name in ready]
        done.update(ready)
    return tuple(ordered)
