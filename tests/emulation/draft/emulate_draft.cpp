// The draft kernels as a shared library for the tests, on the emulated machine.
#define FT_EMULATION
#include "cuda_words.hpp"
#include "kernels/draft.cu"
#include "kernels/draft_legal.cu"

using namespace flashtrie;

// 0 finished; 1 the threads wait for each other for ever.
template <typename Rules>
int run_legal(const LegalParams<Rules>& params, uint32_t num_blocks, size_t shared_bytes, uint32_t seed) {
  gridDim = {num_blocks, 1, 1};
  block_flags.assign(num_blocks, 0);
  const auto run = [&](unsigned char* shared) {
    if (params.sizes.logit_type == kFloat32) build_legal<float>(params, shared);
    if (params.sizes.logit_type == kFloat16) build_legal<__half>(params, shared);
    if (params.sizes.logit_type == kBfloat16) build_legal<Bfloat16>(params, shared);
  };
  return simt::launch(num_blocks, 1, kDraftThreads, shared_bytes, seed, run) ? 0 : 1;
}

template <bool kIsWide>
void run_draft(const DraftParams& params, unsigned char* shared) {
  if (params.sizes.logit_type == kFloat32) build<float, kIsWide>(params, shared);
  if (params.sizes.logit_type == kFloat16) build<__half, kIsWide>(params, shared);
  if (params.sizes.logit_type == kBfloat16) build<Bfloat16, kIsWide>(params, shared);
}

extern "C" {

int emulate_draft(const DraftParams* params, uint32_t x, uint32_t y, uint32_t z, size_t shared_bytes, uint32_t seed) {
  gridDim = {x, y, z};
  block_flags.assign(x * y * z, 0);
  const auto run = [&](unsigned char* shared) {
    params->sizes.top_k > 8 ? run_draft<true>(*params, shared) : run_draft<false>(*params, shared);
  };
  return simt::launch(x * y * z, 1, kDraftThreads, shared_bytes, seed, run) ? 0 : 1;
}

int emulate_legal(const LegalParams<TrieRules>* params, uint32_t num_blocks, size_t shared_bytes, uint32_t seed) {
  return run_legal(*params, num_blocks, shared_bytes, seed);
}

int emulate_masked(const LegalParams<MaskRules>* params, uint32_t num_blocks, size_t shared_bytes, uint32_t seed) {
  return run_legal(*params, num_blocks, shared_bytes, seed);
}

uint64_t draft_params_size() { return sizeof(DraftParams); }
uint64_t legal_params_size() { return sizeof(LegalParams<TrieRules>); }
uint64_t masked_params_size() { return sizeof(LegalParams<MaskRules>); }
}
