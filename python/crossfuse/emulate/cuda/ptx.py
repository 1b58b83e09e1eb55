"""Inline PTX of generated text as calls of the emulator.

TVM wraps each instruction in a helper with one ``asm`` statement. The statement is taken apart and
its instruction looked up; operands stay as they are, so that helpers keep their C++ types.
"""

from __future__ import annotations

import re

from crossfuse.emulate.cuda.instructions import INSTRUCTIONS

_START = re.compile(r"\basm\s*(?:volatile)?\s*\(")
_TEXT = re.compile(r'\s*((?:"(?:[^"\\]|\\.)*"\s*)+)')
_LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')
_OPERAND = re.compile(r'"[=+&]*\w+"\s*\(')
#: Registers that a helper passes on to wgmma: their places are wanted, as they may change
#: meanwhile.
_FROM_REGISTERS = re.compile(r"wgmma\w*_rs_\w*\([^()]*__a0[^()]*\)")
_BY_VALUE = re.compile(r"\buint32_t (__a\d)\b")


def translate_asm(text: str) -> str:
    """Replace every ``asm`` statement whose instruction is known, keeping the number of lines.

    Special registers and cluster barriers must have been replaced before. Unknown statements stay:
    some stand in parts that the preprocessor removes, and the C++ compiler names the others.
    """
    text = _FROM_REGISTERS.sub(lambda each: _BY_VALUE.sub(r"uint32_t& \1", each[0]), text)
    parts: list[str] = []
    position = 0
    for start in _START.finditer(text):
        if start.start() < position:
            continue
        end = _closing(text, start.end())
        statement = text[start.start() : end + 1]
        call = _translate(text[start.end() : end])
        if call is None:
            continue
        parts += [text[position : start.start()], call, "\n" * statement.count("\n")]
        position = end + 1
    return "".join([*parts, text[position:]])


def _translate(body: str) -> str | None:
    match = _TEXT.match(body)
    if match is None:
        return None
    text = "".join(_LITERAL.findall(match[1])).replace("\\n", " ").replace("\\t", " ")
    instruction = " ".join(text.split()).strip("{} ")
    operands = _operands(body[match.end() :])
    for pattern, translator in INSTRUCTIONS:
        found = pattern.fullmatch(instruction)
        if found:
            return translator(found, operands)
    return None


def _operands(text: str) -> list[str]:
    """Expressions of outputs and inputs, in the order of their numbers."""
    found: list[str] = []
    position = 0
    while match := _OPERAND.search(text, position):
        end = _closing(text, match.end())
        found.append(text[match.end() : end].strip())
        position = end + 1
    return found


def _closing(text: str, position: int) -> int:
    """Index of the parenthesis that closes the one before `position`."""
    depth, quoted = 1, False
    while True:
        character = text[position]
        if character == "\\" and quoted:
            position += 1
        elif character == '"':
            quoted = not quoted
        elif not quoted:
            depth += {"(": 1, ")": -1}.get(character, 0)
            if depth == 0:
                return position
        position += 1
