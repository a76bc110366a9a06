"""Chat templates for the tests, written here from nothing: one for each way in which families of models write theirs.

They use what such templates use: loop variables and filters, namespaces, macros, slices, string methods, tojson, strftime_now,
raise_exception, white space control in both styles (all on one line, and spread out with dashes).
"""

CHATML = r"""{% for m in messages %}{% if loop.first and m['role'] != 'system' %}{{ '<|im_start|>system
Be good.<|im_end|>
' }}{% endif %}{{'<|im_start|>' + m['role'] + '
' + m['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

# Turns in brackets, the system message inside the first of them, roles that must alternate.
BRACKETS = r"""{% set has_system = messages and messages[0]['role'] == 'system' %}
{% set turns = messages[1:] if has_system else messages %}
{% for turn in turns %}
{% set expected = ['user', 'assistant'][loop.index0 % 2] %}
{% if turn['role'] != expected %}{{ raise_exception('turn ' ~ loop.index ~ ' is not of ' ~ expected) }}{% endif %}
{% set words = turn['content'].strip() %}
{% if loop.first and has_system %}{% set words = '<<S>>\n' + messages[0]['content'] + '\n<</S>>\n\n' + words %}{% endif %}
{% if expected == 'user' %}{{ bos_token + '[INST] ' + words + ' [/INST]' }}{% else %}{{ ' ' + words + ' ' + eos_token }}{% endif %}
{% endfor %}"""

# Header tokens, a date, tools in the system text or before the first question, one call in an answer.
HEADERS = r"""{{- bos_token -}}
{#- What the caller did not say. -#}
{%- if today is not defined -%}
    {%- set today = strftime_now("%d %b %Y") if strftime_now is defined else "1 Jan 2025" -%}
{%- endif -%}
{%- set early_tools = not (tools_in_user_message | default(true)) -%}
{%- macro header(who) -%}
    <|start_header_id|>{{ who }}<|end_header_id|>{{ "\n\n" }}
{%- endmacro -%}
{%- macro show(list) -%}
    {%- for one in list -%}
        {{- one | tojson(indent=4) ~ "\n\n" -}}
    {%- endfor -%}
{%- endmacro -%}
{%- set rest = messages -%}
{%- set rules = "" -%}
{%- if messages[0].role == "system" -%}
    {%- set rules = messages[0].content | trim -%}
    {%- set rest = messages[1:] -%}
{%- endif -%}
{{- header("system") -}}
{%- if builtin_tools is defined -%}
    {{- "Built in: " + builtin_tools | reject("equalto", "code_interpreter") | join(", ") + "\n" -}}
{%- endif -%}
{{- "Date: " + today + "\n" -}}
{%- if tools is not none and early_tools %}{{ show(tools) }}{% endif -%}
{{- rules ~ "<|eot_id|>" -}}
{%- if tools is not none and not early_tools -%}
    {%- if rest | length == 0 %}{{ raise_exception("nobody asks, so nobody needs tools") }}{% endif -%}
    {{- header("user") -}}{{- show(tools) -}}{{- rest[0]["content"] | trim + "<|eot_id|>" -}}
    {%- set rest = rest[1:] -%}
{%- endif -%}
{%- for m in rest -%}
    {%- if "tool_calls" in m and m.tool_calls -%}
        {%- if m.tool_calls | length != 1 %}{{ raise_exception("one call at a time") }}{% endif -%}
        {%- set f = m.tool_calls[0].function -%}
        {{- header("assistant") -}}
        {%- if builtin_tools is defined and f.name in builtin_tools -%}
            {{- "<|python_tag|>" + f.name + "(" -}}
            {%- for name, value in f.arguments | items -%}
                {{- name ~ '="' ~ value ~ '"' -}}{%- if not loop.last %}{{ ", " }}{% endif -%}
            {%- endfor -%}
            {{- ")" -}}
        {%- else -%}
            {{- '{"name": "' + f.name + '", "parameters": ' + f.arguments | tojson + "}" -}}
        {%- endif -%}
        {{- "<|eot_id|>" -}}
    {%- elif m.role in ("tool", "function") -%}
        {{- header("ipython") -}}
        {{- m.content if m.content is string else m.content | tojson -}}{{- "<|eot_id|>" -}}
    {%- else -%}
        {{- header(m["role"]) + m["content"] | trim + "<|eot_id|>" -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ header("assistant") }}{% endif -%}
"""

# Tools beside the last question, calls with ids of a fixed length, a count kept in a namespace.
TOOL_LISTS = r"""{%- set state = namespace(turn=0) -%}
{%- set asked = messages | selectattr("role", "equalto", "user") | list -%}
{%- set first = messages | selectattr("role", "eq", "system") | map(attribute="content") | first -%}
{{- bos_token -}}
{%- for m in messages if m.role != "system" -%}
    {%- if m.role == "user" -%}
        {%- if state.turn is odd %}{{ raise_exception("two questions in a row") }}{% endif -%}
        {%- set state.turn = state.turn + 1 -%}
        {%- if tools and m == asked[-1] -%}
            {{- "[AVAILABLE_TOOLS][" -}}
            {%- for tool in tools -%}
                {{- '{"function": {' -}}
                {%- for key, value in tool.function.items() if key != "return" -%}
                    {{- '"' + key + '": ' -}}
                    {{- '"' + value + '"' if value is string else value | tojson -}}
                    {{- ", " if not loop.last -}}
                {%- endfor -%}
                {{- "}}" + ("" if loop.last else ", ") -}}
            {%- endfor -%}
            {{- "][/AVAILABLE_TOOLS]" -}}
        {%- endif -%}
        {{- "[INST]" -}}
        {%- if loop.last and first is defined %}{{ first + "\n\n" }}{% endif -%}
        {{- m.content + "[/INST]" -}}
    {%- elif m.tool_calls is defined and m.tool_calls is not none -%}
        [TOOL_CALLS][
        {%- for call in m.tool_calls -%}
            {%- set text = call.function | tojson -%}
            {%- if call.id | default("") | length != 9 %}{{ raise_exception("an id needs 9 characters") }}{% endif -%}
            {{- text[:-1] + ', "id": "' + call.id + '"}' -}}{{- ", " if not loop.last -}}
        {%- endfor -%}
        ]{{ eos_token }}
    {%- elif m.role == "assistant" -%}
        {%- set state.turn = state.turn + 1 -%}
        {{- " " ~ m.content | trim ~ eos_token -}}
    {%- elif m.role in ["tool", "tool_results"] -%}
        {{- '[TOOL_RESULTS]{"content": ' + m.content | string + ', "id": "' + m.tool_call_id | default("none") + '"}' -}}
    {%- else -%}
        {{- raise_exception("no place for the role " + m.role) -}}
    {%- endif -%}
{%- endfor -%}"""

# Another word for a role, content in parts, the system text before the first question.
PARTS = r"""{{ bos_token }}
{%- set names = {"assistant": "model"} -%}
{%- set ns = namespace(before="", n=0) -%}
{%- for m in messages -%}
    {%- if m["role"] == "system" -%}
        {%- set ns.before = (m["content"] if m["content"] is string else m["content"][0]["text"]) + "

" -%}
        {%- continue -%}
    {%- endif -%}
    {%- if (ns.n is even) != (m["role"] == "user") -%}
        {{ raise_exception("users and models take turns") }}
    {%- endif -%}
    {%- set ns.n = ns.n + 1 -%}
    {{ "<start_of_turn>" + names.get(m["role"], m["role"]) + "
" + ns.before }}
    {%- set ns.before = "" -%}
    {%- if m["content"] is string -%}
        {{ m["content"] | trim }}
    {%- elif m["content"] is iterable -%}
        {%- for part in m["content"] -%}
            {%- if part.type == "text" -%}{{ part.text | trim }}
            {%- elif part.type == "image" -%}<start_of_image>
            {%- else -%}{{ raise_exception("a part of the type " ~ part.type) }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("this is no content") }}
    {%- endif -%}
    {{ "<end_of_turn>
" }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "<start_of_turn>model
" }}{% endif -%}
"""

# The role itself in a control token.
ROLE_TOKENS = r"""{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{% if 'tools' in m and m['tools'] is not none %}{{ '<|tool|>' + m['tools'] }}{% endif %}{{ '
' + m['content'] + '<|end|>
' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>
' }}{% else %}{{ eos_token }}{% endif %}"""

# Thinking: kept after the last question, dropped before it, switched off by a variable; tool answers in groups.
THINKING = r"""{%- set ns = namespace(last=messages | length - 1, looking=true) -%}
{%- for m in messages[::-1] -%}
    {%- if ns.looking and m.role == "user" and m.content is string
           and not (m.content.startswith("<tool_response>") and m.content.endswith("</tool_response>")) -%}
        {%- set ns.looking = false -%}
        {%- set ns.last = loop.revindex0 -%}
    {%- endif -%}
{%- endfor -%}
{%- if tools or messages[0].role == "system" -%}
    {{- "<|im_start|>system\n" -}}
    {{- messages[0].content ~ "\n\n" if messages[0].role == "system" -}}
    {%- if tools -%}
        {{- "<tools>\n" ~ tools | map("tojson") | join("\n") ~ "\n</tools>\nAnswer with {\"name\": …, \"arguments\": …}." -}}
    {%- endif -%}
    {{- "<|im_end|>\n" -}}
{%- endif -%}
{%- for m in messages -%}
    {%- set content = m.content if m.content is string else "" -%}
    {%- if m.role == "user" or (m.role == "system" and not loop.first) -%}
        {{- "<|im_start|>" + m.role + "\n" + content + "<|im_end|>\n" -}}
    {%- elif m.role == "assistant" -%}
        {%- set thought = m.reasoning_content | default("") -%}
        {%- if "</think>" in content -%}
            {%- set thought = content.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n") -%}
            {%- set content = content.split("</think>")[-1].lstrip("\n") -%}
        {%- endif -%}
        {{- "<|im_start|>assistant\n" -}}
        {%- if loop.index0 > ns.last and (loop.last or thought) -%}
            {{- "<think>\n" ~ thought.strip("\n") ~ "\n</think>\n\n" -}}
        {%- endif -%}
        {{- content -}}
        {%- for call in m.tool_calls or [] -%}
            {%- set call = call.function or call -%}
            {{- "\n" if content or not loop.first -}}
            {{- '<tool_call>\n{"name": "' ~ call.name ~ '", "arguments": ' -}}
            {{- call.arguments if call.arguments is string else call.arguments | tojson -}}
            {{- "}\n</tool_call>" -}}
        {%- endfor -%}
        {{- "<|im_end|>\n" -}}
    {%- elif m.role == "tool" -%}
        {{- "<|im_start|>user" if loop.first or loop.previtem.role != "tool" -}}
        {{- "\n<tool_response>\n" + content + "\n</tool_response>" -}}
        {{- "<|im_end|>\n" if loop.last or loop.nextitem.role != "tool" -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "<|im_start|>assistant\n" -}}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ "<think>\n\n</think>\n\n" }}{% endif -%}
{%- endif -%}"""

# All on one line, with a state in a namespace that is set to and fro.
ONE_LINE = r"""{% set s = namespace(outputs=false, system='') %}{% for m in messages %}{% if m['role'] == 'system' %}{% set s.system = s.system + m['content'] %}{% endif %}{% endfor %}{{ bos_token }}{{ s.system }}{%- for m in messages %}{%- if m['role'] == 'user' -%}{%- set s.outputs = false -%}{{ '<|User|>' + m['content'] }}{%- elif m['role'] == 'assistant' and m['content'] is none -%}{%- for call in m['tool_calls'] -%}{{ ('<|Assistant|><|calls|>' if loop.first else '\n') + call['type'] + '<|sep|>' + call['function']['name'] + '\n```json\n' + call['function']['arguments']|tojson + '\n```' }}{{ '<|calls_end|>' if loop.last }}{%- endfor %}{%- elif m['role'] == 'assistant' %}{% set text = m['content'] %}{% if '</think>' in text %}{% set text = text.split('</think>')[-1] %}{% endif %}{{ ('<|outputs_end|>' if s.outputs else '<|Assistant|>') + text + '<|end|>' }}{%- set s.outputs = false -%}{%- elif m['role'] == 'tool' -%}{{ ('\n' if s.outputs else '<|outputs|>') + m['content'] }}{%- set s.outputs = true -%}{%- endif %}{%- endfor -%}{% if add_generation_prompt and not s.outputs %}{{ '<|Assistant|><think>\n' }}{% endif %}"""

# Macros that call themselves over a JSON schema.
SCHEMA_TYPES = r"""
{%- macro type_of(spec, depth=0) -%}
    {%- set simple = {"string": "str", "number": "float", "integer": "int", "boolean": "bool"} -%}
    {%- if depth > 6 -%}...
    {%- elif simple[spec.type] is defined -%}{{ simple[spec.type] }}
    {%- elif spec.type == "array" -%}{{ "[" + type_of(spec["items"], depth + 1) + "]" }}
    {%- elif spec.type == "object" -%}
        {
        {%- for name, inner in (spec.properties or {}) | dictsort -%}
            {{ name }}{{ "?" if name not in (spec.required or []) }}: {{ type_of(inner, depth=depth + 1) }}{{ ", " if not loop.last }}
        {%- endfor -%}
        }
    {%- elif spec.type is iterable and spec.type is not string and spec.type is not mapping -%}
        {%- for one in spec.type -%}{{ type_of({"type": one}, depth + 1) }}{{ " | " if not loop.last }}{%- endfor -%}
    {%- else -%}Any{%- endif -%}
    {%- if spec.enum %} in {{ spec.enum | map("tojson") | join("/") }}{% endif -%}
{%- endmacro -%}
{%- macro wrap(tag) %}<{{ tag }}>{{ caller() | indent(2) }}</{{ tag }}>{% endmacro -%}
{{ bos_token }}
{%- for tool in tools or [] %}
{% call wrap("def") %}
{{ tool.function.name }}({{ type_of(tool.function.parameters) }}):
{{ tool.function.description | default("-", true) }}
{% endcall %}
{% endfor %}
{% for m in messages %}<|{{ m.role | upper }}|>{{ (m.content or "") | string | indent(2, first=true) }}
{% endfor %}"""

# Names with colons, no control tokens.
PLAIN = r"""{% for m in messages %}
{% if m['role'] == 'system' %}
System: {{ m['content'] }}
{% elif m['role'] in ['user', 'assistant'] %}
  {{ m['role'] | title }}: {{ m['content'] }}{{ eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
Assistant:
{%- endif %}
{% endfor %}"""

# Switches inside the system text, a mark for training, block set, a default identity.
SWITCHES = r"""{#- the mode -#}
{%- set think = enable_thinking | default(true) -%}
{%- if messages[0].role == "system" -%}
  {%- set own = messages[0].content -%}
  {%- if "/no_think" in own -%}{%- set think = false -%}{%- elif "/think" in own -%}{%- set think = true -%}{%- endif -%}
  {%- set own = own.replace("/no_think", "").replace("/think", "").rstrip() -%}
{%- endif -%}
{%- set about %}
Identity: {{ model_identity | default("a model") }}
Date: {{ strftime_now("%Y-%m-%d") }}
Mode: {{ "think" if think else "answer" }}
{% endset -%}
{{- "<|im_start|>system\n" ~ about | trim ~ ("\n\n" ~ own if own) -}}
{%- if tools -%}
  {%- set list = namespace(text="\n<tools>") -%}
  {%- for tool in tools[:] -%}{%- set list.text = list.text ~ "\n" ~ (tool | string) -%}{%- endfor -%}
  {{- list.text + "\n</tools>" -}}
{%- endif -%}
{{- "<|im_end|>\n" -}}
{%- for m in messages -%}
    {%- set content = m.content if m.content is string else "" -%}
    {%- if m.role == "assistant" -%}
        {% generation %}{{ "<|im_start|>assistant\n" + ("" if think else "<think>\n\n</think>\n") + content.lstrip("\n") + "<|im_end|>\n" }}{% endgeneration %}
    {%- elif m.role != "system" -%}
        {{ "<|im_start|>" ~ ("user" if m.role == "tool" else m.role) ~ "\n" ~ content ~ "<|im_end|>\n" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\n" ~ ("" if think else "<think>\n\n</think>\n") }}{% endif -%}
"""

# Documents, controls and tools as JSON, in turns of their own.
DOCUMENTS = r"""{%- set extra = [] -%}
{%- if tools %}{%- set extra = extra + ["tools"] -%}{%- endif -%}
{%- if documents %}{%- set extra = extra + ["documents"] -%}{%- endif -%}
{%- with about = "Date: " + strftime_now('%B %d, %Y') + ".\nYou have " + (extra | join(" and ") or "nothing") + "." -%}
<|start_of_role|>system<|end_of_role|>{{ messages[0].content if messages and messages[0].role == 'system' else about }}<|end_of_text|>
{%- endwith %}
{% if tools %}<|start_of_role|>tools<|end_of_role|>{{ tools | tojson(indent=4) }}<|end_of_text|>
{% endif %}
{% for document in documents or [] -%}
<|start_of_role|>document {{ loop.index }}<|end_of_role|>{{ document.text }}<|end_of_text|>
{% endfor %}
{%- for m in messages if not (loop_off or (m.role == 'system')) %}
<|start_of_role|>{{ m['role'] }}<|end_of_role|>{{ (m['content'] or '') | string }}<|end_of_text|>
{%- if loop.last and add_generation_prompt %}

<|start_of_role|>assistant{{ ' ' + controls | tojson() if controls }}<|end_of_role|>
{%- endif %}{% endfor %}"""

TEMPLATES = {name: value for name, value in dict(globals()).items() if name.isupper() and isinstance(value, str)}
