# The document's "problem 3": the cache of a conversation of many turns. Its class is a sketch (`pass`); this is the same
# interface at work. Changed: the import, and what the turns say. With a model (PAGED_MODEL names a GGUF file) tokens are the
# model's, and its answers are computed; without one a token is a byte.
import os

import paged
from paged import ConversationCache

llm = paged.LLM(os.environ["PAGED_MODEL"], n_ctx=4096) if os.environ.get("PAGED_MODEL") and hasattr(paged, "LLM") else None
cache = ConversationCache(max_history_len=4096, llm=llm)

# a new turn; blocks that were freed are reused
cache.add_turn("What is a page?", "A block of keys and values, 16 KB of them.")
cache.add_turn("And a block table?", "The list of pages that a sequence has.")
cache.add_turn("Why not one piece?", "It would be reserved for the longest sequence.")
for turn, blocks in cache.block_table.items():
    print(f"turn {turn}: tokens {cache.turns[turn].start} to {cache.turns[turn].end - 1}, blocks {blocks}")

# old turns go, the last stay
computed_again = cache.clear_old_turns(keep_last_n=1)
print(f"{len(cache.turns)} turn of {cache.n_tokens} tokens in {len(cache.used_blocks)} blocks; {computed_again} computed again")

if llm:
    answer = cache.reply("Say it in five words.", max_tokens=16)
    print(f"reply: {answer.text!r}, {answer.cached_tokens} of {answer.prompt_tokens} tokens from the cache")
