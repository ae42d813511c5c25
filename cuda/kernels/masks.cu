// Token masks on device arrays, from the lists: no mask row is made or moved.
//
// mask_apply_* writes minus infinity over a batch of logits but for the tokens that each row's state allows;
// mask_fill writes rows of mask words, mask_advance takes one token for each state. A warp writes a tile of one row and
// nothing waits for anything: reads are the state and its record, and the 16-byte vectors of logits that hold an allowed
// token; every logit is written once. So the bound is that of filling the logits.
#include "../flashtrie/mask_lists.cuh"

using namespace flashtrie;

#define FT_APPLY(name, Type, vectors)                                                                            \
  extern "C" __global__ void __launch_bounds__(kTileThreads) name##_v##vectors(const ApplyParams<MaskLists> p) {       \
    __shared__ uint32_t marks[kTileWarps * LogitTile<Type, vectors>::kWords];                                      \
    apply_tokens<Type, vectors>(p, marks);                                                                         \
  }
#define FT_APPLY_LONG(name, Type, vectors)                                                                       \
  extern "C" __global__ void __launch_bounds__(kTileThreads) name##_long##vectors(const ApplyParams<MaskLists> p) {    \
    __shared__ ApplyShared<LogitTile<Type, vectors>> shared;                                                       \
    apply_tokens_long_first<Type, vectors>(p, shared);                                                             \
  }
#define FT_APPLIES(name, Type) FT_APPLY(name, Type, 1) FT_APPLY(name, Type, 2) FT_APPLY_LONG(name, Type, 4)
FT_APPLIES(mask_apply_float32, Float32)
FT_APPLIES(mask_apply_float16, Float16)
FT_APPLIES(mask_apply_bfloat16, BFloat16)

extern "C" __global__ void __launch_bounds__(kTileThreads) mask_fill(const FillParams<MaskLists> p) {
  __shared__ uint32_t marks[kTileWarps * MaskTile::kWords];
  fill_words(p, marks);
}

extern "C" __global__ void __launch_bounds__(kTileThreads) mask_advance(const MaskAdvanceParams p) { advance_masks(p); }
extern "C" __global__ void __launch_bounds__(kTileThreads) mask_walk(const MaskWalkParams p) { walk_masks(p); }
extern "C" __global__ void __launch_bounds__(kTileThreads) mask_records(const MaskRecordParams p) { make_record(p); }
