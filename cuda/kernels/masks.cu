// Token masks on device arrays, from the lists: no mask row is made or moved.
//
// mask_apply_* writes minus infinity over a batch of logits but for the tokens that each row's state allows;
// mask_fill writes rows of mask words, mask_advance takes one token for each state and mask_walk a row of them. A warp writes a tile of one row and
// nothing waits for anything: reads are the state and its record, and of rows that allow much the 16-byte vectors of
// logits that hold an allowed token; every other logit is written once. So the bound is that of filling the logits.
#include "../flashtrie/mask_lists.cuh"

using namespace flashtrie;

FT_TOKEN_KERNELS(mask, MaskLists, 2, 8)
FT_LONG_KERNELS(mask, MaskLists)

extern "C" __global__ void __launch_bounds__(kTileThreads) mask_records(const MaskRecordParams p) { make_record(p); }
