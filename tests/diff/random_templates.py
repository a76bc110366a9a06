"""Random Jinja templates from a grammar, with types in mind so that most of them render, and random variables.

Strings of the variables are of private characters (and white space), which no template has, and templates write the letters Q
and Z, which no variable has: so each tells where it came from.
"""
import random

PRIVATE = [chr(0xE000 + i) for i in range(40)]
KEYS = ["a", "b", "role", "content", "n", "items"]
NAMES = [key for key in KEYS if key != "items"]  # d.items is the method


class Generator:
    def __init__(self, seed):
        self.r = random.Random(seed)
        self.depth = 0
        self.names = []

    # ---- variables ----

    def content(self):
        n = self.r.choice([0, 1, 3, 8])
        return "".join(self.r.choice(PRIVATE + [" ", "\n", "  "]) for _ in range(n))

    def value(self, depth=2):
        kind = self.r.randrange(9 if depth else 6)
        if kind < 2:
            return self.content()
        if kind < 6:
            return self.r.choice([None, True, False, 0, 1, -3, 7, 2.5, -0.0, 1e20, 12345678])
        if kind == 6:
            return [self.value(depth - 1) for _ in range(self.r.randrange(4))]
        return {self.r.choice(KEYS): self.value(depth - 1) for _ in range(self.r.randrange(4))}

    def variables(self):
        roles = ["user", "assistant", "system"]
        messages = [{"role": self.r.choice(roles), "content": self.content()} for _ in range(self.r.randrange(4))]
        return {
            "messages": messages, "s": self.content(), "t": self.content() + "\n" + self.content(), "n": self.r.randrange(-3, 6),
            "f": self.r.choice([0.5, 2.0, -1.25, 1e-7]), "flag": self.r.random() < 0.5, "nothing": None,
            "xs": [self.content() for _ in range(self.r.randrange(5))], "ns": [self.r.randrange(9) for _ in range(4)],
            "d": {key: self.content() for key in self.r.sample(KEYS, 3)}, "any": self.value(),
        }

    # ---- expressions ----

    def pick(self, *makers):
        """One of the makers' texts; a short one when it is deep."""
        self.depth += 1
        try:
            return makers[0]() if self.depth > 5 else self.r.choice(makers)()
        finally:
            self.depth -= 1

    def literal(self):
        text = self.r.choice(["Q", "Z ", " Q\\n", "QZ|", "", "Q'Z".replace("'", "\\'"), "  ", "<|Z|>", "\\t", "Zé", "\\x51"])
        return f"'{text}'"

    def string(self):
        s, r = self.string, self.r
        return self.pick(
            lambda: r.choice(["s", "t", self.literal()]), self.literal, lambda: r.choice(["s", "t"]),
            lambda: f"{s()} + {s()}", lambda: f"({s()} ~ {self.anything()})", lambda: f"{s()}|trim", lambda: f"{s()}.strip()",
            lambda: f"({s()}){r.choice(['.lstrip()', '.rstrip()', '.strip(s)', '.upper()', '.lower()', '.title()'])}",
            lambda: f"({s()})[{self.slice()}]", lambda: f"{s()}|replace({s()}, {s()})", lambda: f"({s()}).replace({s()}, {s()})",
            lambda: f"({s()}).split({r.choice([s(), '', repr(' ')])})|join({s()})", lambda: f"{self.strings()}|join({s()})",
            lambda: f"{self.anything()}|string", lambda: f"{self.anything()}|tojson",
            lambda: f"{self.anything()}|tojson(indent={r.randrange(3)})", lambda: f"({s()} if {self.boolean()} else {s()})",
            lambda: f"{s()}|{r.choice(['upper', 'lower', 'capitalize', 'title', 'reverse', 'string'])}",
            lambda: f"{s()}|indent({r.choice(['2', 'width=3', '1, true', '2, blank=true'])})", lambda: f"d.{r.choice(NAMES)}",
            lambda: f"d[{s()}]", lambda: f"d.get({r.choice(KEYS)!r}, {s()})", lambda: f"{self.anything()}|default({s()})",
            lambda: f"undef|default({s()}, true)", lambda: f"({s()}) * {r.randrange(3)}", lambda: f"'Q%s%5sZ' % ({s()}, {s()})",
            lambda: f"'%d %.2f' % ({self.number()}, {self.number()})", lambda: f"{s()}|center({r.randrange(20)})",
            lambda: f"{s()}|truncate({r.randrange(3, 9)}, {r.choice(['true', 'false'])}, '..', 0)",
            lambda: f"({self.strings()}|first)", lambda: f"m1({s()})", lambda: f"({s()}).split('\\n')[-1]",
            lambda: f"{self.anything()}|tojson(ensure_ascii=true, sort_keys=false)",
            lambda: f"({s()}).partition({s()})[{r.randrange(3)}]", lambda: f"({s()}).rsplit({s()}, 1)[0]",
            lambda: f"({s()}).removeprefix({s()})", lambda: f"({s()}).splitlines()|join('|')", lambda: "messages[0].role",
            lambda: f"({s()}).{r.choice(['ljust', 'rjust', 'center'])}({r.randrange(9)})", lambda: f"({s()}).split()[:2]|join",
            lambda: "messages[-1]['content']", lambda: f"'Q' 'Z' ~ {s()}", lambda: "loop.index|string", lambda: "w")

    def slice(self):
        def end():
            return self.r.choice(["", "", "1", "-1", "2", "n", "-3", "0", "9"])
        return f"{end()}:{end()}" + (f":{self.r.choice(['', '1', '2', '-1', '-2'])}" if self.r.random() < 0.4 else "")

    def number(self):
        n, r = self.number, self.r
        return self.pick(
            lambda: r.choice(["n", "f", "1", "3", "2.5", "0", "10"]), lambda: f"{n()} {r.choice('+-*')} {n()}",
            lambda: f"({n()}) {r.choice(['/', '//', '%'])} {n()}", lambda: f"({n()}) % {r.choice(['2', '3', '-3', '2.5'])}",
            lambda: f"{self.anything()}|length", lambda: f"{self.strings()}|length", lambda: f"-{n()}", lambda: f"({n()})|abs",
            lambda: f"{self.anything()}|int", lambda: f"{self.anything()}|float", lambda: f"({n()})|round({r.randrange(3)})",
            lambda: "ns|sum", lambda: "ns|max", lambda: f"({n()}|int) ** 2", lambda: "ns[0]", lambda: "loop.index",
            lambda: f"({self.string()}).find({self.string()})", lambda: f"({self.string()}).count({self.string()})",
            lambda: f"({n()})|round(1, {r.choice(['ceil', 'floor', 'common'])!r})", lambda: "'12'|int", lambda: "'1_0.5'|float",
            lambda: "('0x1f'|int(base=16))", lambda: f"({n()} if {self.boolean()} else {n()})")

    def boolean(self):
        b, r, s = self.boolean, self.r, self.string
        tests = ["defined", "undefined", "none", "string", "number", "integer", "float", "boolean", "mapping", "iterable", "sequence",
                 "true", "false", "not none", "not string", "sameas none", "callable"]
        return self.pick(
            lambda: r.choice(["flag", "true", "false", "not flag"]), lambda: f"{b()} {r.choice(['and', 'or'])} {b()}",
            lambda: f"not {b()}", lambda: f"{s()} {r.choice(['==', '!=', '<', '>='])} {s()}",
            lambda: f"{self.number()} {r.choice(['==', '!=', '<', '>', '<=', '>='])} {self.number()}", lambda: f"{s()} in {s()}",
            lambda: f"{s()} not in {self.strings()}", lambda: f"{r.choice(KEYS)!r} in d", lambda: f"{self.anything()} is {r.choice(tests)}",
            lambda: f"{self.anything()} == {self.anything()}", lambda: f"0 < {self.number()} <= 3", lambda: f"undef is {r.choice(tests)}",
            lambda: f"({self.number()}|int) is {r.choice(['even', 'odd', 'divisibleby 3', 'in ns', 'eq 2', 'not lessthan(2)'])}",
            lambda: f"({s()}).{r.choice(['startswith', 'endswith'])}({s()})", lambda: f"({b()})", lambda: "loop.first", lambda: "loop.last",
            lambda: f"{self.anything()} in {self.listing()}", lambda: f"{s()} is in {self.strings()}",
            lambda: f"any.{r.choice(NAMES)} is defined", lambda: f"({s()}).{r.choice(['isdigit', 'isspace', 'isupper'])}()")

    def strings(self):
        s, r = self.string, self.r
        return self.pick(
            lambda: "xs", lambda: f"[{s()}, {s()}]", lambda: f"({s()}).split()", lambda: f"xs[{self.slice()}]",
            lambda: f"xs|map({r.choice(['upper', 'trim', 'string', 'tojson'])!r})|list", lambda: "messages|map(attribute='content')|list",
            lambda: f"messages|selectattr('role', 'equalto', {r.choice(['user', 'system'])!r})|map(attribute='content')|list",
            lambda: f"messages|rejectattr('role', 'in', ['user'])|map(attribute='content')|list", lambda: "xs|sort", lambda: "xs|reverse|list",
            lambda: f"xs|select('ne', {s()})|list", lambda: "xs|unique|list", lambda: f"(xs + [{s()}])", lambda: "d.values()|list",
            lambda: "xs|reject('equalto', '')|list", lambda: f"({s()})|list", lambda: "d|list")

    def listing(self):
        return self.pick(
            self.strings, lambda: "ns", lambda: "messages", lambda: f"({self.anything()}, {self.anything()})", lambda: "range(n)|list",
            lambda: "d.items()|list", lambda: "d|items|list", lambda: f"[{self.anything()}]", lambda: "d|dictsort",
            lambda: "ns|sort(reverse=true)", lambda: "ns|batch(2)|list", lambda: f"[{self.number()}, {self.number()}]|sort",
            lambda: "messages|sort(attribute='role')", lambda: f"ns[{self.slice()}]")

    def dictionary(self):
        return self.pick(
            lambda: "d", lambda: f"{{{self.string()}: {self.anything()}, 'Q': {self.anything()}}}", lambda: f"dict(a={self.anything()})",
            lambda: "messages[0]", lambda: "dict(d, b=1)", lambda: "dict(d|items)")

    def anything(self):
        return self.pick(
            self.string, self.number, self.boolean, self.listing, self.dictionary, lambda: "any", lambda: "nothing", lambda: "any.a",
            lambda: "undef", lambda: "any['b']", lambda: "ns2.count", lambda: "any[0]", lambda: f"any|first", lambda: "w")

    # ---- statements ----

    def open_tag(self, inside, marks=True):
        left = self.r.choice(["", "", "-", "+"]) if marks else ""
        right = self.r.choice(["", "", "-"]) if marks else ""
        return f"{{%{left} {inside} {right}%}}"

    def text(self):
        return self.r.choice(["Q", "\n", " ", "Z\n", "  Q", "\n\n  ", "<|Q|>", "{ Q }", "Z\n   ", "# Z"])

    def output(self):
        left, right = self.r.choice(["", "-"]), self.r.choice(["", "-"])
        return f"{{{{{left} {self.anything()} {right}}}}}"

    def loop(self):
        r, body = self.r, self.body
        target, over = r.choice([("x", self.listing()), ("m", "messages"), ("k, v", "d.items()"), ("x", "range(3)"), ("c", self.string())])
        condition = f" if {self.boolean()}" if r.random() < 0.2 else ""
        jump = self.open_tag(f"if {self.boolean()}") + self.open_tag(r.choice(["break", "continue"])) + self.open_tag("endif")
        used = r.choice(["{{ loop.index }}", "{{ loop.last }}", "{{ loop.revindex }}", "{{ loop.cycle('Q', s) }}", "{{ m.content }}",
                         "{{ x }}", "{{ loop.length }}", "{{ loop.nextitem }}", "{{ loop.previtem is defined }}", "{{ k }}", ""])
        other = self.open_tag("else") + body() if r.random() < 0.3 else ""
        return (self.open_tag(f"for {target} in {over}{condition}") + used + body() + (jump if r.random() < 0.3 else "") + body() +
                other + self.open_tag("endfor"))

    def condition(self):
        out = self.open_tag(f"if {self.boolean()}") + self.body()
        for _ in range(self.r.choice([0, 0, 1, 2])):
            out += self.open_tag(f"elif {self.boolean()}") + self.body()
        if self.r.random() < 0.5:
            out += self.open_tag("else") + self.body()
        return out + self.open_tag("endif")

    def statement(self):
        r = self.r
        return self.pick(
            self.text, self.output, self.output, self.output, self.condition, self.loop, self.text,
            lambda: self.open_tag(f"set w = {self.anything()}"), lambda: self.open_tag(f"set ns2.count = {self.anything()}"),
            lambda: self.open_tag(f"set ns2.out = ns2.out ~ {self.string()}") + "{{ ns2.out }}",
            lambda: self.open_tag("set w") + self.body() + self.open_tag("endset"),
            lambda: self.open_tag("set w | upper | trim") + self.body() + self.open_tag("endset"),
            lambda: self.open_tag(f"set w, v = {self.anything()}, {self.anything()}") + "{{ v }}",
            lambda: self.open_tag(f"filter {r.choice(['upper', 'trim', 'indent(2)', 'replace(s, t)'])}") + self.body() +
            self.open_tag("endfilter"),
            lambda: self.open_tag(f"with w = {self.anything()}") + self.body() + self.open_tag("endwith"),
            lambda: self.open_tag("generation") + self.body() + self.open_tag("endgeneration"),
            lambda: self.open_tag("call(z) m2()") + "{{ z }}" + self.body() + self.open_tag("endcall"),
            lambda: "{#" + r.choice(["", "-"]) + " Q " + r.choice(["", "-"]) + "#}",
            lambda: self.open_tag("raw") + "{{ Q }}{% Z" + self.open_tag("endraw"), lambda: "{{ m1(" + self.anything() + ", b=s) }}",
            lambda: "{{ m3(1, " + self.string() + ") }}", lambda: self.open_tag("if flag") + "{{ raise_exception('Z') }}" + self.open_tag("endif"),
            lambda: "{{ ns2.count }}", lambda: "{{ strftime_now('%d %b %Y') }}")

    def body(self):
        self.depth += 1
        out = "".join(self.statement() for _ in range(self.r.randrange(4)))
        self.depth -= 1
        return out

    def template(self):
        head = (self.open_tag("set ns2 = namespace(count=0, out='')") +
                self.open_tag(f"macro m1(a, b={self.literal()})") + "Q{{ a }}{{ b }}" + self.open_tag("endmacro") +
                self.open_tag("macro m2()") + "[{{ caller(s) }}|{{ caller('Z') }}]" + self.open_tag("endmacro") +
                self.open_tag("macro m3(a)") + "{{ a }}{{ varargs|length }}{{ kwargs|length }}{{ varargs|join('Q') }}" +
                self.open_tag("endmacro"))
        return head + "".join(self.statement() for _ in range(self.r.randrange(1, 7)))
