# The document's block table in Python. Changed: the two lines of `block_table` end after their ids instead of in `...`.
from paged import BlockTable

# the block table in Python
# logically every head has a list of page numbers
# physically: a number in the list -> a place in memory
block_table = {
    # head 0: uses blocks 5, 12, 30 (scattered addresses)
    0: [5, 12, 30],
    # head 1: uses blocks 2, 8, 15, 22
    1: [2, 8, 15, 22],
}

# the physical address
PAGE_SIZE = 16 * 1024
for block_id in block_table[0]:
    physical_addr = block_id * PAGE_SIZE
    print(f"block {block_id}: {block_id} * 16KB = {physical_addr // 1024}KB")

# added: the same by the struct of its kernel (num_blocks, block_ids, block_offsets)
for head, ids in block_table.items():
    table = BlockTable(ids, page_size=PAGE_SIZE)
    print(f"head {head}: {table.num_blocks} blocks, offsets {table.block_offsets.tolist()}")
