"""A Metal source as C++ for machine.cpp. Three things change: threadgroup variables become memory that the machine
checks, attributes vanish, and every instantiated kernel gets an entry that fetches its arguments. Lines stay put."""

from __future__ import annotations

import re

PLACE, GROUP, SIZE = "machine::current->position[{i}]", "machine::launch.group[{i}]", "machine::launch.size[{i}]"
BUILTINS = {  # attribute -> what it is, for axis i
    "threadgroup_position_in_grid": GROUP,
    "thread_position_in_threadgroup": PLACE,
    "threads_per_threadgroup": SIZE,
    "threadgroups_per_grid": "machine::launch.groups[{i}]",
    "thread_position_in_grid": f"{GROUP} * {SIZE} + {PLACE}",
    "thread_index_in_threadgroup": "machine::current->index",
    "simdgroup_index_in_threadgroup": "machine::current->simdgroup",
    "thread_index_in_simdgroup": "machine::current->lane",
}
GRID = {name for name in BUILTINS if name.startswith("thread") and "_index_" not in name}
SPACES = ("device", "constant", "threadgroup", "thread")
# What C++ has and Metal 3.1 has not; bfloat, because an M1's compiler may not have it.
FOREIGN = re.compile(
    r"\b(double|goto|try|throw|catch|virtual|new|delete|dynamic_cast|thread_local|std|bfloat)\b|\[[&=]?\]\s*\("
)
KERNEL = re.compile(r"\[\[kernel, max_total_threads_per_threadgroup\((\d+)\)\]\]\s+void\s+(\w+)\s*\(")
INSTANCE = re.compile(r'template \[\[host_name\("(\w+)"\)\]\] \[\[kernel\]\] decltype\((\w+)(<[^>]*>)\) \2\3;')
VARIABLE = re.compile(r"\bthreadgroup\s+(\w+)\s+(\w+)((?:\s*\[[^\]]*\])*)\s*;")
FUNCTION = re.compile(r"^[^\n#;]*?\b(?!(?:if|for|while|switch)\b)\w+\s*\(([^(){};]*)\)\s*\{", re.M)


def translate(source: str) -> str:
    """C++ of a source; what a Metal compiler would refuse and C++ would not is refused here."""
    if not source.isascii():
        raise SyntaxError("torch hands a source to Metal as ASCII")
    code = without_comments(source)
    require_metal(code)
    require_address_spaces(code)
    kernels = {m[2]: (int(m[1]), parameters(code, m.end())) for m in KERNEL.finditer(code)}
    entries = [entry(m[1], m[2] + m[3], *kernels[m[2]]) for m in INSTANCE.finditer(code)]
    code = VARIABLE.sub(variable, INSTANCE.sub("", code))
    code = re.sub(r"\[\[.*?\]\]", "", code)
    return "\n".join(['#line 1 "kernel.metal"', code, '#line 1 "entries"', *entries])


def without_comments(source: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), source, flags=re.S)


def require_metal(code: str) -> None:
    """No words of C++ that Metal does not have, and threadgroup memory in kernels alone."""
    if found := FOREIGN.search(code):
        raise SyntaxError(f"line {line_of(code, found)}: Metal has no `{found[0]}`")
    bodies = [
        (m.end(), closed(code, code.index("{", closed(code, m.end(), "()")) + 1, "{}")) for m in KERNEL.finditer(code)
    ]
    for found in VARIABLE.finditer(code):
        if not any(start < found.start() < end for start, end in bodies):
            raise SyntaxError(f"line {line_of(code, found)}: `{found[0]}` may stand in a kernel alone")


def line_of(code: str, found: re.Match[str]) -> int:
    return code.count("\n", 0, found.start()) + 1


def require_address_spaces(code: str) -> None:
    """Every pointer or reference that a function takes says which memory it is in."""
    for function in FUNCTION.finditer(code):
        for parameter in split(function[1]):
            if re.search(r"[*&]", parameter) and not re.search(rf"\b({'|'.join(SPACES)})\b", parameter):
                line = code.count("\n", 0, function.start(1)) + 1
                raise SyntaxError(f"line {line}: `{parameter}` needs one of {', '.join(SPACES)}")


def split(text: str) -> list[str]:
    """The parts between commas that stand in no bracket."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "<([{") - (letter in ">)]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def closed(code: str, start: int, pair: str) -> int:
    """Behind the bracket that closes the one before `start`."""
    depth, end = 1, start
    while depth:
        depth += (code[end] == pair[0]) - (code[end] == pair[1])
        end += 1
    return end


def parameters(code: str, start: int) -> list[str]:
    return split(code[start : closed(code, start, "()") - 1])


def entry(name: str, function: str, threads: int, declared: list[str]) -> str:
    """What the machine calls, and how many threads the kernel was compiled for."""
    arguments, bound, widths = [], 0, set()
    for parameter in declared:
        attribute = re.search(r"\[\[(\w+)\]\]", parameter)
        if attribute:
            axes = int(parameter.split()[0][-1]) if parameter.split()[0][-1].isdigit() else 1
            widths |= {axes} if attribute[1] in GRID else set()
            values = ", ".join(BUILTINS[attribute[1]].format(i=i) for i in range(axes))
            arguments.append(f"{parameter.split()[0]}{{{values}}}")
            continue
        kind = "Value" if "&" in parameter else "Values" if "constant" in parameter else "Pointer"
        arguments.append(f"machine::{kind}{{{bound}}}")
        bound += 1
    if len(widths) > 1:
        raise SyntaxError(f"{function}: places in the grid are all numbers or all vectors of one width")
    called = f"{function}({', '.join(arguments)});"
    return f'extern "C" {{ unsigned threads_{name} = {threads}; void entry_{name}() {{ {called} }} }}'


def variable(declaration: re.Match[str]) -> str:
    kind, name, sizes = declaration.groups()
    memory = f'machine::threadgroup_variable(sizeof({name}_type), sizeof({kind}), "{name}")'
    return f"using {name}_type = {kind}{sizes}; {name}_type &{name} = *({name}_type *){memory};"
