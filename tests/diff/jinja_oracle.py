"""Python's jinja2, set up as transformers sets it up for chat templates, and our tool_jinja beside it."""
import datetime
import functools
import json
import os
import subprocess
import time

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

NOW = 1_755_000_000  # for strftime_now


class Generation(jinja2.ext.Extension):
    """{% generation %}: a block that transformers marks for training, and that is a call block underneath."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


def _tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message):
    raise jinja2.exceptions.TemplateError(message)


def environment():
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = lambda form: datetime.datetime.fromtimestamp(NOW).strftime(form)
    return env


ENVIRONMENT = environment()


@functools.lru_cache(maxsize=1)
def _compile(template):
    return ENVIRONMENT.from_string(template)


def expected(template, variables):
    """("ok", text) or ("error", what)."""
    try:
        return "ok", _compile(template).render(**variables)
    except Exception as failure:  # noqa: BLE001: whatever it is, it is an error of the template
        return "error", f"{type(failure).__name__}: {failure}"


def ours(program, cases):
    """For each (template, variables): (status, text, marks); marks is a string of 0 and 1, one for each byte."""
    request = bytearray()
    for template, variables in cases:
        variables = dict(variables)
        parts = [template.encode(), b"", b""]
        if "messages" in variables:
            parts[2] = json.dumps(variables.pop("messages"), ensure_ascii=False).encode()
        parts[1] = json.dumps(variables, ensure_ascii=False).encode()
        request += f"{len(parts[0])} {len(parts[1])} {len(parts[2])} {NOW}\n".encode() + b"".join(parts)
    done = subprocess.run([program], input=bytes(request), capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    answers, at, out = [], 0, done.stdout
    for _ in cases:
        end = out.index(b"\n", at)
        status, size = out[at:end].decode().split()
        text = out[end + 1:end + 1 + int(size)]
        at = end + 1 + int(size)
        marks = ""
        if status == "ok":
            marks = out[at:at + int(size)].decode()
            at += int(size)
        answers.append((status, text.decode(errors="replace"), marks))
    assert at == len(out)
    return answers


def use_utc():
    """The time zone of strftime_now on both sides."""
    os.environ["TZ"] = "UTC"
    time.tzset()
