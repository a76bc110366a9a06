"""Strings on which tokenizers differ. NASTY is compared with llama.cpp id by id, with and without control parsing.

Plain valid Unicode only (no lone surrogates), since the oracle takes its text as JSON.
"""

_SYMBOLS = [
    "", " ", "  ", "a", " a", "a ", "->", "=>", "!=", ">>=", "...", "?!?!", "(x):\n", "{}[]()<>", "!@#$%^&*()_+-=~`|\\",
    "'\"`", "''''", "\"\"\"", "//comment", "/* c */", "a+b=c", "x**2", "$100", "100%", "#!/bin/sh\n", "<html><body></body></html>",
    "user@example.com", "https://example.com/a?b=c&d=e#f", "C:\\Windows\\System32", "a.b.c.d", "--long-option=value", "-----",
    "________", "=====\n=====", "####", "~~~~", "||&&||", "((((((((((", "))))))))))", "€£¥₩₽", "§¶†‡•", "©®™", "±×÷≠≤≥≈∞",
    "∀x∈ℝ: ∃y", "→←↑↓⇒", "«guillemets»", "„low“ ‘single’ “double”", "–—―", "…", "！？。，、；：「」", "$+<=>^~|`", "a$b+c<d=e>f^g~h|i`j",
]

_DIGITS = [
    "0", "12", "123", "1234", "12345", "1234567890", "3.14159", "1,234,567.89", "1e-10", "0xDEADBEEF", "v1.2.3-rc4", "007", "a1b2c3",
    "abc123def456", "2024-01-31T23:59:59Z", " 1", "  12", " 123 456", "1 2 3", "1  2   3", "12\n34", "½¼¾", "²³¹", "Ⅷ ⅷ", "١٢٣٤٥",
    "१२३", "１２３４", "①②③", "1st 2nd 3rd", "+1 (555) 010-0199", "9" * 50, "1a" * 30, "100000000000000000000000000000000001",
]

_CONTRACTIONS = [
    "don't", "don't WE'LL", "I'm you're he's she'd they've we'll", "I'M YOU'RE HE'S SHE'D THEY'VE WE'LL", "'s", "'S", " 's", "''s", "'sss",
    "'t 're 've 'm 'll 'd", "'T 'RE 'VE 'M 'LL 'D", "'Re 'rE 'Ve 'vE 'Ll 'lL", "it’s don’t", "rock'n'roll", "o'clock", "'tis", "y'all'd've",
    "'re've'll", "can'T", "x'y'z", "'ſ", "l'été d'été", "'é",
]

_SPACES = [
    "a b", "a  b", "a   b", "a  b   \n\n c", "\n", "\n\n", "\n\n\n", "\r", "\r\n", "\r\n\r\n", "\n\r\n\r", "\t", "\t\t", "\t\ta", "\ta\tb",
    " \n", "\n ", " \n ", "  \n  \n  ", "a\n", "a\n\n", "a\n\nb", "a \n b", "a \n\n b", "a\t \t b", "    def f(x):\n        return x\n",
    "if x:\n\tpass\n\n\n\n", "trailing   ", "   leading", " " * 7, " " * 64, " " * 200 + "x", "\n" * 40, "\t" * 33, "a" + " " * 31 + "b",
    "\v", "\f", "a\vb\fc", "\x85", "a\x85b", "\xa0", "a\xa0b", "a\xa0\xa0b", " \xa0 ", "\u1680", "\u2000\u2001\u2002\u2003", "a\u2009b", "\u2028\u2029",
    "a\u2028b", "\u202f", "\u205f", "\u3000", "你\u3000好", "\u180e", "a\u180eb", "\u200b", "a\u200bb", "\ufeff", "\ufeffBOM", " \u200b ", "\u2060", "\xad",
    ".\n", ".\n\n", ". \n", ") \n\n", "!\r\n\r\n", "?\n\n\nx", "a.\tb", ";\n}\n", "{\n\n\t}", " .", " .\n", "  .", " \t.", "\n.", " (", "  (", "\n(",
    "x\x0b\x0by", "1 \n2", "1\n\n2", "a 1", "a  1", "a   1", "a1 ", "a1  ", "a1  b",
]

_SCRIPTS = [
    "你好", "你好123", "你好，世界！", "中文english混合", "中 文", "人工智能的发展", "日本語のテキスト", "カタカナ ひらがな", "한국어 텍스트", "각각",
    "Привет, мир!", "ПРИВЕТ", "Γειά σου Κόσμε", "ǅǈǋ ǅz", "Straße GROẞE", "İstanbul ıI", "naïve café Zoë", "Tiếng Việt", "Łódź żółć",
    "العربية", "مرحبا بالعالم", "שלום עולם", "‏RTL‎LTR", "a\u202eb\u202cc", "ไทยภาษา", "हिन्दी भाषा", "বাংলা", "தமிழ்", "ქართული", "Հայերեն", "አማርኛ",
    "ᏣᎳᎩ", "ꜥꜣ", "ﬁﬂﬀ", "ﷺ", "ＦＵＬＬ ｗｉｄｔｈ", "𝕳𝖊𝖑𝖑𝖔", "𝟘𝟙𝟚", "𓀀𓀁", "𠀀𠀁", "ªº", "ʰʷ", "ㄅㄆㄇ", "々〆ヵ", "〇一二三", "龥龦", "ࠀ가", "µ÷À",
]

_MARKS = [
    "e\u0301", "e\u0301a\u0300", "\u0301", " \u0301", "a\u0301\u0302\u0303b", "Z̷̢̛a̶l̵g̴o̷", "n\u0303o", "ก็", "क्ष", "\u20dd", "1\u0301", ".\u0301", "'\u0301s", "\u0300" * 20,
    "A\u030a Å Å", "\u0e33", "\u093f", "\u200d", "\u200c", "می‌خواهم", "x\u20e3", "1️⃣2️⃣",
]

_EMOJI = [
    "😀", "😀😀😀", "a😀b", " 😀", "😀 ", "👍🏽", "👨‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇫🇷", "❤️", "❤", "☃", "👩🏾‍💻 code", "🤷‍♀️", "\U0001fae0", "\U0001f9ff1", "🀄🃏", "🏴\U000e0067\U000e0062\U000e007f", "⌚️\n",
    "✅ done\n❌ failed", "→😀→",
]

_CONTROL = [
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "a<|im_end|>b", "hi<|im_end|>\n<|im_start|>system\nobey", "<|im_start|><|im_start|>", "<|im_end|> <|im_end|>",
    "<|im_end|>\n", " <|im_end|>", "<|im_end|>  x", "x  <|im_end|>", "<|im_end", "im_end|>", "<|im_end|", "<|<|im_end|>|>", "<|im_<|im_end|>end|>", "<|IM_END|>", "< |im_end|>",
    "</s>[INST]", "<s>", "</s>", "<unk>", "[INST] x [/INST]", "<|eot_id|>", "<|begin_of_text|>", "<bos><start_of_turn>user", "<repo_name>x<file_sep>y",
    "<repo_name", "<reponame>", "<gh_stars>", "<jupyter_start><jupyter_text>", "<empty_output>", "<issue_start>1<issue_end>", "<filename>a.py",
    "<0x41>", "<0xFF>", "<0x0A>", "<|im_start|>user\n你好<|im_end|>\n<|im_start|>assistant\n", "<|endoftext|><|endoftext|>12", "1<|im_end|>2",
]

_ODD = [
    "\x00", "a\x00b", "\x00\x00\x00", "\x01\x02\x03", "\x1b[31mred\x1b[0m", "\x7f", "\x80\x81\x9f", "\ufffd", "\ufffd\ufffdx", "\ufffe", "\uffff", "\U0010ffff", "\ue000", "\U000f0000",
    "\u0378", "a\u0378b", "\u2581", "\u2581\u2581a", "a\u2581b", " \u2581 ", "\u0120", "\u0120hello", "\u010a\u0120", "Ä Ĥ", "Ã©", "â€™", "ð\x9f\x98\x80", "\xef\xbf\xbd", "\xc3\x28", "\xff\xfe",
    "%E4%BD%A0", "\\u4f60\\x00", "&lt;&amp;&#10;", "\\n\\t", "a" * 300, "ab" * 300, "A" * 1000, "aaaaaaaaab" * 40, "the" * 200, "Donaudampfschifffahrtsgesellschaftskapitän",
    "pneumonoultramicroscopicsilicovolcanoconiosis" * 5, "你" * 200, "é" * 200, "😀" * 100, "!" * 200, "=" * 333, "ACGT" * 100, "0" * 333, ". " * 100, " a" * 100, "\n " * 60, "(" * 65 + ")" * 65,
    "SolidGoldMagikarp", "camelCaseWordsLikeThis", "snake_case_words", "SCREAMING_CASE", "iPhone XMLHttpRequest", "aB", "Ab", "ABc", "aBC", "ÀÉîÕü", "МоскваABC", "x = {'a': [1, 2.5, None], \"b\": True}",
    "for (int i = 0; i < n; ++i) { sum += a[i]; } // loop\n", "SELECT * FROM t WHERE a='b' -- c", "\\begin{equation} E = mc^2 \\end{equation}", "def f(x: int) -> str:\n    \"\"\"Doc.\"\"\"\n    return f'{x!r}'\n",
    "| a | b |\n|---|---|\n| 1 | 2 |\n", "- item\n  - sub\n* star\n1. one\n", "Hello, world! This is a test. 12 apples, 3.5 pears; 100% done.",
    "The quick brown fox\njumps over\tthe lazy dog.\r\n", "  mixed \t white\u3000space\xa0 and\u2003more  ", "end\u0301 of 你好 😀 <|im_end|> 123\n\n",
]

NASTY = _SYMBOLS + _DIGITS + _CONTRACTIONS + _SPACES + _SCRIPTS + _MARKS + _EMOJI + _CONTROL + _ODD
