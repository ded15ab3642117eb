"""Costs read from the text of a compiled program: products, and bytes that collectives send.

XLA's own cost analysis counts a loop's body once; here it counts as often as the loop turns, where the compiler knows
that. Knows nothing of models, meshes and steps.
"""

import math
import re
from collections import Counter
from functools import cache

FLOPS = "flops"
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_COMPUTATION = re.compile(r"(ENTRY )?%(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%(?P<name>\S+) = (?P<type>.+?) (?P<opcode>[a-z][a-z0-9-]*)\((?P<rest>.*)")
_ARRAY = re.compile(r"([a-z]+)(\d*)\w*\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|(?:true|false)_computation|branch_computations)=(%[^,\s]+|\{[^}]+\})")
_NAME = re.compile(r"%([^\s,)}]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")


def program_costs(hlo: str) -> Counter:
    """One device's costs by a compiled program's text: FLOPS of products, bytes sent by each kind of COLLECTIVES.

    Loops count as often as they turn, and of a branch the costliest side. Raises ValueError for a loop with products
    or collectives in it whose turns the compiler does not know.
    """
    computations: dict[str, list[re.Match]] = {}
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            current = computations.setdefault("ENTRY" if header[1] else header[2], [])
        elif instruction := _INSTRUCTION.match(line):
            current.append(instruction)

    @cache
    def costs(computation: str) -> Counter:
        types = {instruction["name"]: instruction["type"] for instruction in computations[computation]}
        total = Counter()
        for instruction in computations[computation]:
            total.update(_own_costs(instruction, types))
            called = [costs(name) for names in _CALLED.findall(instruction["rest"]) for name in _NAME.findall(names)]
            costliest = max(called, key=Counter.total, default=Counter())
            turns = _turns(instruction) if costliest and instruction["opcode"] == "while" else 1
            total.update({kind: cost * turns for kind, cost in costliest.items()})
        return total

    return costs("ENTRY")


def _own_costs(instruction: re.Match, types: dict[str, str]) -> dict[str, int]:
    kind, rest = instruction["opcode"].removesuffix("-start"), instruction["rest"]
    if kind != "dot" and kind not in COLLECTIVES:
        return {}
    operands = [_ARRAY.findall(types[name]) for name in _NAME.findall(rest.split(")")[0])]
    if kind != "dot":  # what a device puts in
        return {kind: sum(_bits(array) // 8 for arrays in operands for array in arrays)}
    left = _sizes(operands[0][0])
    contracted = math.prod(left[int(i)] for i in _CONTRACTED.search(rest)[1].split(",") if i)
    return {FLOPS: 2 * contracted * math.prod(_sizes(_ARRAY.search(instruction["type"]).groups()))}


def _turns(loop: re.Match) -> int:
    known = _TRIPS.search(loop["rest"])
    if known is None:
        raise ValueError(f"loop {loop['name']} has products or collectives, but how often it turns is not known")
    return int(known[1])


def _sizes(array: tuple[str, str, str]) -> list[int]:
    return [int(size) for size in array[2].split(",") if size]


def _bits(array: tuple[str, str, str]) -> int:
    return int(array[1] or 8) * math.prod(_sizes(array))  # a type without a number is pred
