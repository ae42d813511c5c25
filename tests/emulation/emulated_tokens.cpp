// The kernels of token masks and of token-trie steps as a shared library for the tests, on the emulated machine.
#define FLASHTRIE_EMULATE
#include "flashtrie/mask_lists.cuh"
#include "flashtrie/trie_children.cuh"

#include <string>
#include <type_traits>

using namespace flashtrie;

namespace {

struct Launch {
  const void* params;
  uint32_t num_blocks, num_threads, seed;
  template <typename Kernel>
  int run(size_t shared_bytes, Kernel kernel) const {
    return simt::launch(num_blocks, 1, num_threads, shared_bytes, seed, kernel) ? 0 : 1;
  }
};

template <typename Tile, typename Source>
int run_apply(const Launch& launch) {
  const auto& p = *static_cast<const ApplyParams<Source>*>(launch.params);
  return launch.run(kTileWarps * Tile::kWords * sizeof(uint32_t), [&](unsigned char* shared) {
    apply_tokens<Tile>(p, reinterpret_cast<uint32_t*>(shared));
  });
}

template <typename Tile, typename Source>
int run_apply_long(const Launch& launch) {
  const auto& p = *static_cast<const ApplyParams<Source>*>(launch.params);
  return launch.run(sizeof(ApplyShared<Tile>), [&](unsigned char* shared) {
    apply_tokens_long_first(p, *reinterpret_cast<ApplyShared<Tile>*>(shared));
  });
}

template <typename Source, typename Type>
int run_form(const Launch& launch, const std::string& form) {
  if (form == "v1") return run_apply<LogitTile<Type, 1>, Source>(launch);
  if (form == "v2") return run_apply<LogitTile<Type, 2>, Source>(launch);
  if (form == "v4") return run_apply<LogitTile<Type, 4, std::is_same_v<Source, MaskLists> ? 2 : 4>, Source>(launch);
  if constexpr (std::is_same_v<Source, MaskLists>)
    if (form == "long4") return run_apply_long<LogitTile<Type, 4>, Source>(launch);
  return 2;
}

// `name` without its prefix: apply_float32_v2, fill.
template <typename Source>
int run_common(const Launch& launch, const std::string& name) {
  if (name == "fill")
    return launch.run(kTileWarps * MaskTile::kWords * sizeof(uint32_t), [&](unsigned char* shared) {
      fill_words(*static_cast<const FillParams<Source>*>(launch.params), reinterpret_cast<uint32_t*>(shared));
    });
  const size_t at = name.rfind('_');
  if (name.rfind("apply_", 0) != 0 || at < 6) return 2;
  const std::string type = name.substr(6, at - 6), form = name.substr(at + 1);
  if (type == "float32") return run_form<Source, Float32>(launch, form);
  if (type == "float16") return run_form<Source, Float16>(launch, form);
  if (type == "bfloat16") return run_form<Source, BFloat16>(launch, form);
  return 2;
}

template <typename Params, void (*kKernel)(const Params&)>
int run_plain(const Launch& launch) {
  return launch.run(1, [&](unsigned char*) { kKernel(*static_cast<const Params*>(launch.params)); });
}

}  // namespace

extern "C" {

// 0 finished; 1 the threads wait for each other for ever; 2 no such kernel.
int emulate_tokens(const char* kernel, const void* params, uint32_t num_blocks, uint32_t num_threads, uint32_t seed) {
  const Launch launch{params, num_blocks, num_threads, seed};
  const std::string name = kernel;
  if (name == "mask_records") return run_plain<MaskRecordParams, make_record>(launch);
  if (name == "mask_advance") return run_plain<AdvanceParams<MaskLists>, advance_rows>(launch);
  if (name == "mask_walk") return run_plain<WalkParams<MaskLists>, walk_rows>(launch);
  if (name == "trie_steps_advance") return run_plain<AdvanceParams<TrieChildren>, advance_rows>(launch);
  if (name == "trie_steps_walk") return run_plain<WalkParams<TrieChildren>, walk_rows>(launch);
  if (name == "trie_steps_children") return run_plain<TrieChildrenParams, list_children>(launch);
  if (name.rfind("mask_", 0) == 0) return run_common<MaskLists>(launch, name.substr(5));
  if (name.rfind("trie_steps_", 0) == 0) return run_common<TrieChildren>(launch, name.substr(11));
  return 2;
}

// Sizes of the parameters, in the order of the tests.
void token_param_sizes(uint64_t* to) {
  const uint64_t sizes[] = {sizeof(ApplyParams<MaskLists>), sizeof(FillParams<MaskLists>), sizeof(AdvanceParams<MaskLists>),
                            sizeof(WalkParams<MaskLists>), sizeof(MaskRecordParams), sizeof(ApplyParams<TrieChildren>),
                            sizeof(FillParams<TrieChildren>), sizeof(AdvanceParams<TrieChildren>), sizeof(WalkParams<TrieChildren>),
                            sizeof(TrieChildrenParams)};
  memcpy(to, sizes, sizeof sizes);
}
}
