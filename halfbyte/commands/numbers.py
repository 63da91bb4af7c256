"""Numbers on the command line, as argparse's `type=`: refused with a sentence before anything runs."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import TypeVar

Number = TypeVar("Number", int, float)
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


MOST = 10**9  # seconds, MB or GB: clocks and files count no further
MOST_COUNTED = 1 << 42  # of anything; as MB it is the most bytes that a system counts


def byte_count(text: str) -> int:
    """4GB, 512MB, 1.5GiB, or plain bytes."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?) ?(|[kmgt]i?)b?", text.lower())
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(f"must be a size, as 4GB, 512MB or 1.5GiB, got {text}")
    return int(float(found[1]) * UNITS[found[2]])


def positive(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return within(MOST, value)


def seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text}")
    return within(MOST, value)


def within(most: int, value: Number) -> Number:
    if value > most:
        raise argparse.ArgumentTypeError(f"must be at most {most}, got {value:g}")
    return value


def whole(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return int(text)


def at_least(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not (text.removeprefix("-").isdecimal() and int(text) >= least):
            raise argparse.ArgumentTypeError(f"must be {least} or more, got {text}")
        return within(MOST_COUNTED, int(text))

    return read


def counts(text: str) -> list[int]:
    """512 or 128,512,2048; 0 is allowed."""
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"must be whole numbers with commas between, as 128,512, got {text}")
    return [int(part) for part in parts]


def at_least_one(text: str) -> list[int]:
    if 0 in (found := counts(text)):
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return found


def part(text: str) -> tuple[int, int]:
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"must be one part of several, as 2/8, got {text}")
    return int(number), int(of)


def pair(text: str) -> tuple[int, int]:
    if len(found := counts(text)) != 2 or 0 in found:
        raise argparse.ArgumentTypeError(f"must be two numbers, as 512,128, got {text}")
    return found[0], found[1]
