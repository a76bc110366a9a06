"""Texts for the comparisons with llama.cpp, written for this test: plain English, code, Chinese, emoji."""

ENGLISH = """\
The lighthouse keeper wrote one line in the log every evening: wind, visibility, ships. On the fourteenth of \
November he wrote four. A fishing boat had come in under the cliffs with her engine dead, and the village had \
pulled her up the shingle with two ropes and a tractor while the tide was still rising. Nobody was hurt. The boy \
who had first seen the light from the school window got a medal made from the lid of a biscuit tin, and he wore \
it until it rusted.

Years later, when the light had been automatic for a decade, a museum asked for the logs. There were thirty-one \
volumes. Most days say very little, and that is their value: a quiet record of ordinary weather, kept by people \
who did not know which day would matter. A good cache is a little like that. It keeps what was already worked \
out, in pages of equal size, and it never pretends to know more than it was told.
"""

CODE = '''\
static int free_list_pop(struct pool *pool) {
    if (pool->n_free == 0)
        return -1;
    int block = pool->free[--pool->n_free];
    pool->refs[block] = 1;
    return block;
}

def blocks_needed(n_tokens: int, block_size: int = 16) -> int:
    """Round up: a partly filled block is a block."""
    if n_tokens < 0:
        raise ValueError(f"n_tokens must not be negative, got {n_tokens}")
    return (n_tokens + block_size - 1) // block_size

for n in range(0, 65, 16):
    print(n, blocks_needed(n), blocks_needed(n + 1))

SELECT hash, last_used FROM blocks WHERE pinned = 0 ORDER BY last_used ASC LIMIT 10;
'''

CHINESE = """\
老图书馆的书架分成许多格子，每一格正好放十六本书。新书来了，管理员就找一个空格子放进去，再在卡片上写下格子的号码。\
读者不需要知道书放在哪里，只要看卡片就能找到。有人还书以后，格子又空了出来，可以给别人使用。这样，没有一格是浪费的。
"""

EMOJI = """\
Packing list 🧳: tent ⛺, stove 🔥, 2 × water 💧, map 🗺️ and a good book 📚!
Weather: ☀️ → ⛅ → 🌧️ … bring boots 🥾🥾. Crew: 👩‍🚀👨🏽‍🍳👨‍👩‍👧‍👦 🇨🇭🇯🇵. Done ✅ 100% 🎉🎉🎉 (≈ 3½ days, naïve café)
"""

TEXTS = {"english": ENGLISH, "code": CODE, "chinese": CHINESE, "emoji": EMOJI}
