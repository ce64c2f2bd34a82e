# SPDX-License-Identifier: Apache-2.0
"""The aggregations of Pinot that exist: one row each. What a row says is explained in aggregates.py.

Kernels called `agg_*` are in exec/agg_*.py. Exact where Pinot is exact; sketches where Pinot uses sketches, merged
from partials that are columns of bytes, or sets of small integers (HyperLogLog).
"""

from __future__ import annotations

from cremant.model.schema import DataType
from cremant.sql import aggregate_parameters as parameters
from cremant.sql.aggregates import Aggregate, Label, Partial, Takes

INFINITY = "CAST('inf' AS DOUBLE)"
MINUS_INFINITY = "CAST('-inf' AS DOUBLE)"
NAN = "CAST('nan' AS DOUBLE)"

_SUM, _MIN, _MAX = Partial("{sum}", "sum({p})"), Partial("{min}", "min({p})"), Partial("{max}", "max({p})")
_COUNT = Partial("{count}", "sum({p})")
#: All values, as one list.
_UNITED = "flatten(array_agg({p}) FILTER (WHERE {p} IS NOT NULL))"
_LIST = Partial("{list}", _UNITED)
#: Merged partials of a kernel that takes the list of them.
_PARTS = "array_agg({p}) FILTER (WHERE {p} IS NOT NULL)"

COUNT = Aggregate(
    names=("count",), partials=(_COUNT,), final="CAST({0} AS BIGINT)", empty="0", type=DataType.LONG,
    takes=Takes.ANY, never_null=True,
)  # fmt: skip

_BASIC: tuple[Aggregate, ...] = (
    COUNT,
    Aggregate(names=("sum", "sum0"), partials=(_SUM,), final="CAST({0} AS DOUBLE)", empty="0.0", type=DataType.DOUBLE),
    Aggregate(names=("min",), partials=(_MIN,), final="CAST({0} AS DOUBLE)", empty=INFINITY, type=DataType.DOUBLE),
    Aggregate(
        names=("max",), partials=(_MAX,), final="CAST({0} AS DOUBLE)", empty=MINUS_INFINITY, type=DataType.DOUBLE
    ),
    Aggregate(
        names=("avg",), partials=(_SUM, _COUNT), final="CAST({0} AS DOUBLE) / CAST(NULLIF({1}, 0) AS DOUBLE)",
        empty=MINUS_INFINITY, type=DataType.DOUBLE, takes=Takes.LENIENT,
    ),
    Aggregate(
        names=("minmaxrange",), partials=(_MIN, _MAX), final="CAST({1} AS DOUBLE) - CAST({0} AS DOUBLE)",
        empty=MINUS_INFINITY, type=DataType.DOUBLE, takes=Takes.LENIENT,
    ),
    Aggregate(
        names=("sumint", "sumlong"), partials=(_SUM,), final="CAST({0} AS BIGINT)", empty="0", type=DataType.LONG,
        lists=False,
    ),
    Aggregate(
        names=("minlong",), partials=(_MIN,), final="CAST({0} AS BIGINT)", empty="9223372036854775807",
        type=DataType.LONG, lists=False,
    ),
    Aggregate(
        names=("maxlong",), partials=(_MAX,), final="CAST({0} AS BIGINT)", empty="(-9223372036854775807 - 1)",
        type=DataType.LONG, lists=False,
    ),
    Aggregate(
        names=("minstring",), partials=(_MIN,), final="{0}", empty=None, type=DataType.STRING, takes=Takes.ANY,
        lists=False, parameters=parameters.of_text,
    ),
    Aggregate(
        names=("maxstring",), partials=(_MAX,), final="{0}", empty=None, type=DataType.STRING, takes=Takes.ANY,
        lists=False, parameters=parameters.of_text,
    ),
    Aggregate(
        names=("booland",), partials=(Partial("bool_and({x}){f}", "bool_and({p})"),), final="{0}", empty="TRUE",
        type=DataType.BOOLEAN, takes=Takes.LOGICAL, lists=False,
    ),
    Aggregate(
        names=("boolor",), partials=(Partial("bool_or({x}){f}", "bool_or({p})"),), final="{0}", empty="FALSE",
        type=DataType.BOOLEAN, takes=Takes.LOGICAL, lists=False,
    ),
    Aggregate(
        names=("anyvalue",),
        partials=(Partial("first_value({x}){filled}", "first_value({p}) FILTER (WHERE {p} IS NOT NULL)"),),
        final="{0}", empty=None, type=None, takes=Takes.ANY, lists=False,
    ),
    Aggregate(
        names=("sumprecision",), partials=(Partial("{exact_sum}", f"agg_decimal_sum({_PARTS})"),),
        final="agg_plain_decimal({0}, {digits}, {scale})", empty="'0'", type=DataType.STRING, takes=Takes.DECIMAL,
        arity=(1, 3), lists=False, parameters=parameters.of_precision,
    ),
)  # fmt: skip


def _distinct(names: tuple[str, ...], final: str, keyed: str, kind: DataType, empty: str, takes: Takes) -> Aggregate:
    return Aggregate(
        names=names, element="{x}", elements="{unique_list}", final=final, keyed=keyed, type=kind, empty=empty,
        takes=takes, never_null=kind is not DataType.DOUBLE,
    )  # fmt: skip


def _coupons(names: tuple[str, ...], family: str, final: str, kind: DataType, empty: str, log2m: int) -> Aggregate:
    """HyperLogLog: a distinct aggregation of coupons."""
    return Aggregate(
        names=names, element=f"agg_{family}_{{kind}}({{x}}, {{log2m}})",
        elements=f"agg_{family}s_{{kind}}({{list}}, {{log2m}})", final=final, type=kind, empty=empty,
        takes=Takes.HASHED, arity=(1, 3), parameters=parameters.of_log2m(log2m), never_null=True,
    )  # fmt: skip


_NO_COUPONS = "arrow_cast(make_array(), 'List(Int32)')"
_DISTINCT: tuple[Aggregate, ...] = (
    _distinct(
        ("distinctcount", "distinctcountbitmap", "distinctcountoffheap", "distinctcountsmarthll",
         "distinctcountsmarthllplus", "distinctcountsmartull"),
        "CAST(cardinality({unique}) AS INT)", "CAST(count(DISTINCT {d}) AS INT)", DataType.INT, "0", Takes.ANY,
    ),
    _distinct(
        ("segmentpartitioneddistinctcount",), "CAST(cardinality({unique}) AS BIGINT)", "count(DISTINCT {d})",
        DataType.LONG, "0", Takes.ANY,
    ),
    _distinct(
        ("distinctsum",), "array_sum({unique})", "sum(DISTINCT CAST({d} AS DOUBLE))", DataType.DOUBLE, "0.0",
        Takes.DOUBLE,
    ),
    _distinct(
        ("distinctavg",), "array_sum({unique}) / CAST(NULLIF(cardinality({unique}), 0) AS DOUBLE)",
        "sum(DISTINCT CAST({d} AS DOUBLE)) / CAST(NULLIF(count(DISTINCT {d}), 0) AS DOUBLE)", DataType.DOUBLE, NAN,
        Takes.DOUBLE,
    ),
    _coupons(("distinctcounthll",), "hll", "agg_hll_count({set}, {log2m})", DataType.LONG, "0", 8),
    _coupons(
        ("distinctcountrawhll",), "hll", "agg_hll_raw({set}, {log2m})", DataType.STRING,
        f"agg_hll_raw({_NO_COUPONS}, {{log2m}})", 8,
    ),
    _coupons(
        ("distinctcounthllplus", "distinctcountull"), "hllplus", "agg_hllplus_count({set}, {log2m})", DataType.LONG,
        "0", 14,
    ),
)  # fmt: skip


def _theta(name: str, final: str, kind: DataType, empty: str) -> Aggregate:
    return Aggregate(
        names=(name,), partials=(
            Partial(
                "agg_theta_pack({hashes}, {k})", f"agg_theta_merge({_PARTS}, {{k}})",
                "agg_theta_stream(agg_hash_{kind}({x}), {k}){f}",
            ),
        ),
        final=final, type=kind, empty=empty, takes=Takes.HASHED, arity=(1, 2), parameters=parameters.of_theta,
        never_null=True,
    )  # fmt: skip


def _cpc(name: str, final: str, kind: DataType, empty: str) -> Aggregate:
    return Aggregate(
        names=(name,), partials=(Partial("agg_cpc_pack_{kind}({list}, {k})", f"agg_cpc_merge({_PARTS}, {{k}})"),),
        final=final, type=kind, empty=empty, takes=Takes.HASHED, arity=(1, 2), parameters=parameters.of_cpc,
        never_null=True,
    )  # fmt: skip


def _quantile(name: str, sketch: str, final: str, kind: DataType, empty: str, size: int, scale: int = 1) -> Aggregate:
    return Aggregate(
        names=(name,),
        partials=(Partial(
                f"agg_{sketch}_pack({{list}}, {{k}})", f"agg_{sketch}_merge({_PARTS}, {{k}})",
                f"agg_{sketch}_stream({{x}}, {{k}}){{f}}",
            ),),
        final=final, type=kind, empty=empty, takes=Takes.DOUBLE, arity=(1, 3),
        parameters=parameters.of_percent(size, scale), label=Label.PERCENT,
    )  # fmt: skip


_SKETCHES: tuple[Aggregate, ...] = (
    _theta("distinctcountthetasketch", "agg_theta_count({0})", DataType.LONG, "0"),
    _theta("distinctcountrawthetasketch", "agg_sketch_hex({0})", DataType.STRING, "''"),
    _cpc("distinctcountcpcsketch", "agg_cpc_count({0})", DataType.LONG, "0"),
    _cpc("distinctcountrawcpcsketch", "agg_sketch_hex({0})", DataType.STRING, "''"),
    Aggregate(
        names=("percentile",), partials=(_LIST,), final="agg_percentile({0}, {percent})", type=DataType.DOUBLE,
        empty=MINUS_INFINITY, takes=Takes.DOUBLE, arity=(1, 2), parameters=parameters.of_percent(0),
        label=Label.PERCENT,
    ),
    # DataSketches' t-digest of compression 100 errs by 2 % of the rank around the median, of 500 by 0.6 % (9 KB).
    _quantile("percentiletdigest", "tdigest", "agg_tdigest_quantile({0}, {percent})", DataType.DOUBLE, NAN, 100, 5),
    _quantile("percentilekll", "kll", "agg_kll_quantile({0}, {percent})", DataType.DOUBLE, NAN, 200),
    _quantile(
        "percentileest", "kll", "agg_whole(agg_kll_position({0}, {percent}))", DataType.LONG,
        "(-9223372036854775807 - 1)", 1000,
    ),
)  # fmt: skip


def _moments(name: str, server: str, merge: str, final: str, empty: str, *, pair: bool = False) -> Aggregate:
    return Aggregate(
        names=(name,), partials=(Partial(server, f"{merge}({_UNITED})"),), final=final, type=DataType.DOUBLE,
        empty=empty, takes=Takes.DOUBLE, arity=(2, 2) if pair else (1, 1), lists=False,
        parameters=parameters.of_pair if pair else parameters.of_nothing, label=Label.ALL if pair else Label.FIRST,
    )  # fmt: skip


_VARIANCE = "make_array(CAST(count({x}){f} AS DOUBLE), avg({x}){f}, var_pop({x}){f} * count({x}){f})"
_COVARIANCE = (
    "make_array(CAST(count(*){both} AS DOUBLE), avg({x}){both}, avg({y}){both}, var_pop({x}){both} * count(*){both}, "
    "var_pop({y}){both} * count(*){both}, covar_pop({x}, {y}){both} * count(*){both})"
)
_FOURTH = "agg_moments4({list})"
_STATISTICS: tuple[Aggregate, ...] = (
    _moments("varpop", _VARIANCE, "agg_merge_variance", "agg_variance({0}, FALSE)", MINUS_INFINITY),
    _moments("varsamp", _VARIANCE, "agg_merge_variance", "agg_variance({0}, TRUE)", MINUS_INFINITY),
    _moments("stddevpop", _VARIANCE, "agg_merge_variance", "sqrt(agg_variance({0}, FALSE))", MINUS_INFINITY),
    _moments("stddevsamp", _VARIANCE, "agg_merge_variance", "sqrt(agg_variance({0}, TRUE))", MINUS_INFINITY),
    _moments("covarpop", _COVARIANCE, "agg_merge_covariance", "agg_covariance({0}, FALSE)", MINUS_INFINITY, pair=True),
    _moments("covarsamp", _COVARIANCE, "agg_merge_covariance", "agg_covariance({0}, TRUE)", MINUS_INFINITY, pair=True),
    _moments("corr", _COVARIANCE, "agg_merge_covariance", "agg_correlation({0})", MINUS_INFINITY, pair=True),
    _moments("skewness", _FOURTH, "agg_merge_moments4", "agg_skewness({0})", NAN),
    _moments("kurtosis", _FOURTH, "agg_merge_moments4", "agg_kurtosis({0})", NAN),
)


def _at_time(name: str, direction: str, extreme: str) -> Aggregate:
    """The value at the first or last time; of several at that time the one that arrived last."""
    kept = "first_value({p%d} ORDER BY {p1} " + direction + ", {p2} DESC) FILTER (WHERE {p1} IS NOT NULL)"
    order = f"ORDER BY {{y}} {direction}, {{offset}} DESC){{both}}"
    return Aggregate(
        names=(name,),
        partials=(
            Partial(f"first_value({{x}} {order}", kept % 0),
            Partial(f"{extreme}({{y}}){{both}}", f"{extreme}({{p1}})"),
            Partial(f"first_value({{offset}} {order}", kept % 2),
        ),
        final="{0}", type=None, empty="{nothing}", takes=Takes.ANY, arity=(3, 3), lists=False,
        parameters=parameters.of_time, label=Label.ALL,
    )  # fmt: skip


_COLLECTED: tuple[Aggregate, ...] = (
    _at_time("firstwithtime", "ASC", "min"),
    _at_time("lastwithtime", "DESC", "max"),
    Aggregate(
        names=("mode",), partials=(Partial("agg_counts({list})", _UNITED),), final="agg_mode({0}, {choice})",
        type=DataType.DOUBLE, empty=MINUS_INFINITY, arity=(1, 2), parameters=parameters.of_mode, lists=False,
    ),
    Aggregate(
        names=("histogram",),
        partials=(Partial("agg_histogram({list}, {edges})", f"agg_add_lists({_UNITED}, {{bins}})"),),
        final="{0}", type=DataType.DOUBLE, array=True, empty="{zeros}", takes=Takes.DOUBLE, arity=(2, 4),
        parameters=parameters.of_histogram, lists=False, never_null=True,
    ),
    Aggregate(
        names=("arrayagg",), partials=(_LIST,), final="{gathered}", type=None, array=True, empty="{nothing}",
        takes=Takes.ANY, arity=(2, 3), parameters=parameters.of_array,
    ),
    Aggregate(
        names=("listagg",), partials=(_LIST,), final="array_to_string({gathered}, {separator})", type=DataType.STRING,
        empty="''", takes=Takes.ANY, arity=(2, 3), parameters=parameters.of_text_list,
    ),
)  # fmt: skip

AGGREGATES: tuple[Aggregate, ...] = (*_BASIC, *_DISTINCT, *_SKETCHES, *_STATISTICS, *_COLLECTED)
