// The extension module: one binding file per part of the engine, each with its own `bind_*`.
#include "bindings.hpp"

NB_MODULE(_native, m) {
  m.doc() = "flashtrie's C++ engine; use it through flashtrie_cli, which validates what comes here";
  flashtrie::bind_trie(m);
  flashtrie::bind_tails(m);
  flashtrie::bind_build(m);
  flashtrie::bind_query(m);
  flashtrie::bind_search(m);
  flashtrie::bind_gpu_query(m);
  flashtrie::bind_gpu_batch(m);
  flashtrie::bind_baselines(m);
  flashtrie::bind_parse(m);
  flashtrie::bind_draft(m);
  flashtrie::bind_masks(m);
  flashtrie::bind_trie_steps(m);
}
