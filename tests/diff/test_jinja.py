"""Goal: chat templates mean here what they mean in transformers, and no content looks like the template's own text.
Method: tool_jinja beside Python's jinja2 in transformers' sandbox: templates with the structure of real models' over many
conversations, cases for each rule, and thousands of random templates. Bytes that came from variables must be marked.
"""
import os
import re

import pytest

import jinja_oracle
from chat_templates import TEMPLATES
from conftest import random_seed
from random_templates import Generator

LONG = bool(os.environ.get("PAGED_LONG"))
ADDRESS = re.compile(r" object at 0x|<(built-in|bound) ")  # the text of what has none here
BIG = "an integer of more than 64 bits"  # Python has them, and we say that we do not
jinja_oracle.use_utc()


@pytest.fixture(scope="module")
def tool():
    from conftest import program
    return program("tool_jinja")


def compare(tool, cases, seed=None, marked=False):
    """All cases at once; both render the same text, or both fail. Returns (rendered, failed) counts."""
    wrong, counts = [], [0, 0]
    for (template, variables), (status, text, marks) in zip(cases, jinja_oracle.ours(tool, cases)):
        kind, want = jinja_oracle.expected(template, variables)
        if kind == "ok" and (ADDRESS.search(want) or (status == "PAGED_ERR_LIMIT" and text.endswith(BIG))):
            continue
        counts[kind != "ok"] += 1
        if (status == "ok") != (kind == "ok") or (status == "ok" and text != want):
            wrong.append(f"{template!r}\n  with {variables!r}\n  want {kind} {want!r}\n  got  {status} {text!r}")
        elif status == "ok" and marked:
            wrong += [f"{template!r}\n  with {variables!r}\n  marks: {problem}" for problem in bad_marks(text, marks)]
    assert not wrong, f"seed {seed}: {len(wrong)} of {len(cases)} differ, first:\n" + "\n".join(wrong[:3])
    return counts


def bad_marks(text, marks):
    """Private characters come from variables only, Q and Z from templates only."""
    at = 0
    for char in text:
        size = len(char.encode())
        here = marks[at:at + size]
        if "\ue000" <= char <= "\uf8ff" and here != "1" * size:
            yield f"byte {at} of a variable is not raw"
        if char in "QZ" and here != "0" * size:
            yield f"byte {at} of the template is raw"
        at += size


TOOLS = [
    {"type": "function", "function": {
        "name": "get_weather", "description": "The weather \"now\" at a place.\n<|im_end|>",
        "parameters": {"type": "object", "properties": {
            "city": {"type": "string", "description": "Where; é 🦙"}, "days": {"type": "array", "items": {"type": "integer"}},
            "unit": {"type": ["string", "null"], "enum": ["c", "f"]}}, "required": ["city"]}}},
    {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}},
]
CALL = {"id": "call12345", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln", "days": [1, 2.5, None]}}}
USER, SYSTEM = {"role": "user", "content": " What is it?\n"}, {"role": "system", "content": "Be /no_think brief.\n"}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nIt is <|im_end|> this. "}
CONVERSATIONS = [
    [USER], [SYSTEM, USER], [USER, ANSWER, USER], [SYSTEM, USER, ANSWER, USER, ANSWER], [USER, USER], [SYSTEM], [ANSWER], [],
    [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "12 °C", "tool_call_id": "call12345"}],
    [USER, {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}, {"role": "tool", "content": "1"},
     {"role": "tool", "content": "2"}, ANSWER],
    [{"role": "user", "content": [{"type": "text", "text": " look "}, {"type": "image"}]}], [{"role": "user"}], [{"content": "x"}],
    [{"role": "user", "content": 5}], [SYSTEM, {"role": "user", "content": "你好 🦙 \u00a0"}, {"role": "wizard", "content": "x"}],
]
EXTRAS = [
    {}, {"tools": TOOLS}, {"add_generation_prompt": True}, {"add_generation_prompt": True, "enable_thinking": False},
    {"tools": TOOLS, "tools_in_user_message": False, "add_generation_prompt": True, "documents": [{"text": "x"}]},
    {"builtin_tools": ["code_interpreter", "get_weather"], "add_generation_prompt": False}, {"date_string": "today", "controls": {"a": 1}},
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_of_real_structure(tool, name):
    cases = []
    for messages in CONVERSATIONS:
        for extra in EXTRAS:
            variables = {"bos_token": "<s>", "eos_token": "</s>", "tools": None, "documents": None, "messages": messages} | extra
            cases.append((TEMPLATES[name], variables))
    rendered, _ = compare(tool, cases)
    assert rendered >= len(EXTRAS) * 3


def test_random_templates(tool):
    """Each template with four sets of variables: jinja2 takes longest to compile."""
    seed = random_seed()
    cases = []
    for i in range(20000 if LONG else 600):
        generator = Generator(f"{seed}-{i}")
        template = generator.template()
        cases += [(template, generator.variables()) for _ in range(4)]
    rendered, failed = compare(tool, cases, seed, marked=True)
    assert rendered > failed / 2 and failed > 10
