"""Many kernels in one call: machine code walks over a table of compiled functions and their arguments.

A call of a kernel from Python looks at the type of every argument and unpacks each array: a few microseconds, which is
what a small kernel takes. Here arguments are unpacked once, into a block of 64-bit words; a few instructions load them
and call the function that Numba has compiled, in Numba's own calling convention. Python's lock is free meanwhile.
"""

import ctypes
import struct
from functools import cache
from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir
from numba.core import types
from numba.core.compiler_lock import global_compiler_lock

WORD, STATUS = ir.IntType(64), ir.IntType(32)
NONE = -2  # what a function may return beside 0 where all went well: its result is None
UNUSUAL, FAILED = 1, 2  # what a trampoline answers: a kernel returned something other than 0; it raised
_known: dict[str, tuple[Any, ...]] = {}  # of compiled functions, by their names: where they are, how they are called


class Launch:
    """A compiled function with arguments that stay where they are: its address, and the block that it is called with.

    The block's first word takes the result. A function that returns a number returns 0 where things are usual.
    """

    def __init__(self, compiled, arguments, *held):
        self.kept = compiled, arguments, held
        description = compiled.fndesc
        name = description.llvm_func_name
        if name not in _known:
            convention = compiled.target_context.call_conv.get_function_type(description.restype, description.argtypes)
            number = isinstance(description.restype, types.Integer)
            _known[name] = compiled.library.get_pointer_to_function(name), convention, number, str(convention)
        self.function, self.convention, self.returns_number, said = _known[name]
        self.shape = said, self.returns_number  # what decides how it is called
        words = [0]
        for kind, value in zip(description.argtypes, arguments, strict=True):
            words += unpacked(kind, value)
        assert len(words) == len(self.convention.args) - 1
        self.block = np.array(words, np.uint64)


def unpacked(kind, value):
    """A value as Numba passes it, in words."""
    if isinstance(kind, types.Array):
        return [0, 0, value.size, value.itemsize, value.ctypes.data, *value.shape, *map(unsigned, value.strides)]
    if isinstance(kind, types.BaseTuple):
        return [word for each, one in zip(kind, value, strict=True) for word in unpacked(each, one)]
    if isinstance(kind, types.Float):
        size = "f" if kind.bitwidth == 32 else "d"
        return [int.from_bytes(struct.pack("<" + size, value), "little")]
    if isinstance(kind, types.Integer | types.Boolean):
        return [unsigned(int(value))]
    raise TypeError(f"an argument of type {kind} cannot be laid out")


def unsigned(number):
    return number & (1 << 64) - 1


def trampoline(module, name, launch):
    """name(function, block): call the function with the words of the block."""
    made = ir.Function(module, ir.FunctionType(STATUS, [WORD, WORD.as_pointer()]), name)
    function, block = made.args
    code = ir.IRBuilder(made.append_basic_block())
    convention = launch.convention
    result = code.bitcast(block, convention.args[0])
    error = code.alloca(convention.args[1].pointee)
    given = []
    for index, kind in enumerate(convention.args[2:]):
        word = code.load(code.gep(block, [WORD(index + 1)]))
        if isinstance(kind, ir.IntType):
            given.append(word if kind == WORD else code.trunc(word, kind))
        elif isinstance(kind, ir.FloatType):
            given.append(code.bitcast(code.trunc(word, STATUS), kind))
        elif isinstance(kind, ir.DoubleType):
            given.append(code.bitcast(word, kind))
        else:
            given.append(code.inttoptr(word, kind))
    status = code.call(code.inttoptr(function, convention.as_pointer()), [result, error, *given])
    well = code.or_(code.icmp_signed("==", status, STATUS(0)), code.icmp_signed("==", status, STATUS(NONE)))
    answer = STATUS(0)
    if launch.returns_number:
        usual = code.icmp_signed("==", code.load(block), WORD(0))
        answer = code.select(usual, STATUS(0), STATUS(UNUSUAL))
    code.ret(code.select(well, answer, STATUS(FAILED)))


def walker(module):
    """walk(table, first, end): rows of (trampoline, function, block) in turn; the first whose answer is not 0, or end.

    The answer stands in the table's first word, which is no row's.
    """
    made = ir.Function(module, ir.FunctionType(WORD, [WORD.as_pointer(), WORD, WORD]), "walk")
    table, first, end = made.args
    enter, loop, work, onward, leave = (made.append_basic_block() for _ in range(5))
    kind = ir.FunctionType(STATUS, [WORD, WORD.as_pointer()])
    code = ir.IRBuilder(enter)
    code.branch(loop)
    code.position_at_end(loop)
    row = code.phi(WORD)
    row.add_incoming(first, enter)
    code.cbranch(code.icmp_signed("<", row, end), work, leave)
    code.position_at_end(work)
    start = code.add(code.mul(row, WORD(3)), WORD(1))
    call, function, block = (code.load(code.gep(table, [code.add(start, WORD(i))])) for i in range(3))
    answer = code.call(code.inttoptr(call, kind.as_pointer()), [function, code.inttoptr(block, WORD.as_pointer())])
    code.store(code.sext(answer, WORD), table)
    code.cbranch(code.icmp_signed("==", answer, STATUS(0)), onward, leave)
    code.position_at_end(onward)
    row.add_incoming(code.add(row, WORD(1)), onward)
    code.branch(loop)
    code.position_at_end(leave)
    code.ret(row)


def addresses_of(text, names):
    """Compile a module of LLVM's; where each of these functions is."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    triple = binding.get_process_triple()
    with global_compiler_lock:
        parsed = binding.parse_assembly(text)
        parsed.triple = triple
        machine = binding.Target.from_triple(triple).create_target_machine(opt=1)
        engine = binding.create_mcjit_compiler(parsed, machine)
        engine.finalize_object()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))  # threads run its code until the process has ended
    return [engine.get_function_address(name) for name in names]


def built(build):
    """What build(module) puts into a module, as text."""
    module = ir.Module()
    build(module)
    return str(module)


@cache
def walk():
    """The compiled walker. It lets Python's lock go, unless the threads serve one caller at a time."""
    from . import OWN_THREADS

    (address,) = addresses_of(built(walker), ["walk"])
    numba.get_num_threads()  # starts them
    lonely = not OWN_THREADS and numba.threading_layer() == "workqueue"
    kind = ctypes.PYFUNCTYPE if lonely else ctypes.CFUNCTYPE
    return kind(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)(address)


_trampolines: dict[Any, int] = {}


def trampolines(launches):
    """Where the trampoline of each of these is."""
    new = {one.shape: one for one in launches if one.shape not in _trampolines}
    if new:
        names = {shape: f"call{index}" for index, shape in enumerate(new)}
        text = built(lambda module: [trampoline(module, names[shape], one) for shape, one in new.items()])
        found = addresses_of(text, names.values())
        _trampolines.update(zip(new, found, strict=True))
    return [_trampolines[one.shape] for one in launches]


class Program:
    """Launches in order. `run(first)` goes from there to the end, or to one that is unusual, and returns which."""

    def __init__(self, launches):
        self.launches, self.end = launches, len(launches)
        rows = [
            (call, one.function, one.block.ctypes.data)
            for call, one in zip(trampolines(launches), launches, strict=True)
        ]
        self.table = np.array([0, *(word for row in rows for word in row)], np.int64)
        self.at, self.walk = self.table.ctypes.data, walk()

    def run(self, first=0):
        return self.checked(self.walk(self.at, first, self.end))

    def checked(self, stopped):
        if stopped < self.end and self.table[0] != UNUSUAL:
            raise MemoryError("a kernel of a recorded step had no memory")  # of what may fail, only that is left
        return stopped


# A loop of Numba's threads whose turns are programs: (table, end, where it has stopped).
TURN = """
define void @turn(ptr %arguments, ptr %counts, ptr %steps, ptr %data) {{
  %row = load ptr, ptr %arguments
  %table = load ptr, ptr %row
  %at_end = getelementptr i64, ptr %row, i64 1
  %end = load i64, ptr %at_end
  %walk = inttoptr i64 {walk} to ptr
  %stopped = call i64 %walk(ptr %table, i64 0, i64 %end)
  %at_stopped = getelementptr i64, ptr %row, i64 2
  store i64 %stopped, ptr %at_stopped
  ret void
}}
"""


@cache
def turns():
    """The compiled turn, and the loop that gives each to a thread, as far as there are threads."""
    (turn,) = addresses_of(TURN.format(walk=ctypes.cast(walk(), ctypes.c_void_p).value), ["turn"])
    pointers, counts = [ctypes.c_void_p] * 5, [ctypes.c_int64, ctypes.c_int64, ctypes.c_int32]
    loop = ctypes.CFUNCTYPE(None, *pointers, *counts)(binding.address_of_symbol("numba_parallel_for"))
    return turn, loop


class Beside:
    """Programs that touch nothing of each other's, each by one thread from its beginning to its end."""

    def __init__(self, programs):
        self.programs = programs
        self.turn, self.loop = turns()
        self.rows = np.array([(one.at, one.end, 0) for one in programs], np.int64)
        self.arguments = np.array([self.rows.ctypes.data], np.int64)
        self.counts, self.steps = np.array([len(programs)], np.int64), np.array(self.rows.strides[:1], np.int64)

    def run(self):
        """Where each has stopped."""
        pointers = (one.ctypes.data for one in (self.arguments, self.counts, self.steps))
        self.loop(self.turn, *pointers, None, 0, 1, len(self.programs))
        return [one.checked(stopped) for one, stopped in zip(self.programs, self.rows[:, 2].tolist(), strict=True)]
