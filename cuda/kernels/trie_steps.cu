// Steps of a token trie on device arrays: a model held to its keys without a mask or a state leaving the GPU.
//
// trie_steps_apply_* leaves, of a batch of logits, only those of the tokens that may follow each row's node;
// trie_steps_fill writes the same as rows of mask words, trie_steps_children as lists; trie_steps_advance takes a token
// each. A warp a tile or a row, nothing waits for anything.
#include "../flashtrie/trie_children.cuh"

using namespace flashtrie;

#define FT_APPLY(name, Type, vectors)                                                                            \
  extern "C" __global__ void __launch_bounds__(kTileThreads) name##_v##vectors(const ApplyParams<TrieChildren> p) {       \
    __shared__ uint32_t marks[kTileWarps * LogitTile<Type, vectors>::kWords];                                      \
    apply_tokens<Type, vectors>(p, marks);                                                                         \
  }
#define FT_APPLY_LONG(name, Type, vectors)                                                                       \
  extern "C" __global__ void __launch_bounds__(kTileThreads) name##_long##vectors(const ApplyParams<TrieChildren> p) {    \
    __shared__ ApplyShared<LogitTile<Type, vectors>> shared;                                                       \
    apply_tokens_long_first<Type, vectors>(p, shared);                                                             \
  }
#define FT_APPLIES(name, Type) FT_APPLY(name, Type, 1) FT_APPLY(name, Type, 2) FT_APPLY_LONG(name, Type, 4)
FT_APPLIES(trie_steps_apply_float32, Float32)
FT_APPLIES(trie_steps_apply_float16, Float16)
FT_APPLIES(trie_steps_apply_bfloat16, BFloat16)

extern "C" __global__ void __launch_bounds__(kTileThreads) trie_steps_fill(const FillParams<TrieChildren> p) {
  __shared__ uint32_t marks[kTileWarps * MaskTile::kWords];
  fill_words(p, marks);
}

extern "C" __global__ void __launch_bounds__(kTileThreads) trie_steps_advance(const TrieAdvanceParams p) { advance_in_trie(p); }
extern "C" __global__ void __launch_bounds__(kTileThreads) trie_steps_walk(const TrieWalkParams p) { walk_trie(p); }
extern "C" __global__ void __launch_bounds__(kTileThreads) trie_steps_children(const TrieChildrenParams p) { list_children(p); }
