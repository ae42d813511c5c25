// Steps of a token trie on device arrays: a model held to its keys without a mask or a state leaving the GPU.
//
// trie_steps_apply_* leaves, of a batch of logits, only those of the tokens that may follow each row's node;
// trie_steps_fill writes the same as rows of mask words, trie_steps_children as lists; trie_steps_advance takes a token
// each, trie_steps_walk a row of them. A warp a tile or a row, nothing waits for anything.
#include "../flashtrie/trie_children.cuh"

using namespace flashtrie;

FT_TOKEN_KERNELS(trie_steps, TrieChildren, 4, 6)

extern "C" __global__ void __launch_bounds__(kTileThreads) trie_steps_children(const TrieChildrenParams p) { list_children(p); }
