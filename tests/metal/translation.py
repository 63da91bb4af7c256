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
SPACES = ("device", "constant", "threadgroup", "thread")
KERNEL = re.compile(r"(?:\bkernel|\[\[kernel[^\]]*\]\])\s+void\s+(\w+)\s*\(")
INSTANCE = re.compile(r'template \[\[host_name\("(\w+)"\)\]\] \[\[kernel\]\] decltype\((\w+)(<[^>]*>)\) \2\3;')
VARIABLE = re.compile(r"\bthreadgroup\s+(\w+)\s+(\w+)((?:\s*\[[^\]]*\])*)\s*;")
FUNCTION = re.compile(r"^[^\n#;]*?\b(?!(?:if|for|while|switch)\b)\w+\s*\(([^(){};]*)\)\s*\{", re.M)


def translate(source: str) -> str:
    """C++ of a source; what a Metal compiler would refuse and C++ would not is refused here."""
    code = without_comments(source)
    require_address_spaces(code)
    signatures = {m[1]: parameters(code, m.end()) for m in KERNEL.finditer(code)}
    entries = [entry(m[1], m[2] + m[3], signatures[m[2]]) for m in INSTANCE.finditer(code)]
    code = VARIABLE.sub(variable, INSTANCE.sub("", code))
    code = re.sub(r"\[\[.*?\]\]", "", code)
    code = re.sub(r"\bkernel\s+void\b", "void", code)
    return "\n".join(['#line 1 "kernel.metal"', code, '#line 1 "entries"', *entries])


def without_comments(source: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), source, flags=re.S)


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


def parameters(code: str, start: int) -> list[str]:
    depth, end = 1, start
    while depth:
        depth += (code[end] == "(") - (code[end] == ")")
        end += 1
    return split(code[start : end - 1])


def entry(name: str, function: str, declared: list[str]) -> str:
    arguments, bound = [], 0
    for parameter in declared:
        attribute = re.search(r"\[\[(\w+)\]\]", parameter)
        if attribute:
            axes = int(parameter.split()[0][-1]) if parameter.split()[0][-1].isdigit() else 1
            values = ", ".join(BUILTINS[attribute[1]].format(i=i) for i in range(axes))
            arguments.append(f"{parameter.split()[0]}{{{values}}}")
            continue
        kind = "Value" if "&" in parameter else "Values" if "constant" in parameter else "Pointer"
        arguments.append(f"machine::{kind}{{{bound}}}")
        bound += 1
    return f'extern "C" void entry_{name}() {{ {function}({", ".join(arguments)}); }}'


def variable(declaration: re.Match[str]) -> str:
    kind, name, sizes = declaration.groups()
    memory = f'machine::threadgroup_variable(sizeof({name}_type), sizeof({kind}), "{name}")'
    return f"using {name}_type = {kind}{sizes}; {name}_type &{name} = *({name}_type *){memory};"
