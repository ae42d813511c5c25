// The search kernels as a shared library for the tests, on the emulated machine.
#define FLASHTRIE_EMULATE
#include "flashtrie/pack_hits.cuh"
#include "flashtrie/search_group.cuh"

using namespace flashtrie;

template <int kBlocks, int kWarps>
void sizes(const SearchBatch* batch, uint64_t* fixed, uint64_t* large) {
  using Places = SharedPlaces<kBlocks, kWarps>;
  *fixed = Places::kTables;
  *large = 2 * Places::table_bytes(*batch) + Places::large_bytes(*batch);
}

extern "C" {

// 0 finished; 1 the threads wait for each other for ever; 2 no such kernel.
int emulate_search(const SearchBatch* batch, const char* kernel, uint32_t num_blocks, uint32_t num_threads,
                   size_t shared_bytes, uint32_t seed) {
  const std::string name = kernel;
  auto run = [&](auto search, uint32_t blocks) { return simt::launch(num_blocks, blocks, num_threads, shared_bytes, seed, search) ? 0 : 1; };
  if (name == "search_block") return run([&](unsigned char* shared) { GroupSearch<1, 16, kShared>(*batch, shared).run(); }, 1);
  if (name == "pairs_block") return run([&](unsigned char* shared) { GroupSearch<1, 16, kPairs>(*batch, shared).run(); }, 1);
  if (name == "search_alone") return run([&](unsigned char* shared) { GroupSearch<1, 20, kShared>(*batch, shared).run(); }, 1);
  if (name == "pairs_alone") return run([&](unsigned char* shared) { GroupSearch<1, 20, kPairs>(*batch, shared).run(); }, 1);
  if (name == "search_spill") return run([&](unsigned char* shared) { GroupSearch<1, 16, kSpills>(*batch, shared).run(); }, 1);
  if (name == "search_cluster4") return run([&](unsigned char* shared) { GroupSearch<4, 20, kShared>(*batch, shared).run(); }, 4);
  if (name == "pairs_cluster8") return run([&](unsigned char* shared) { GroupSearch<8, 20, kPairs>(*batch, shared).run(); }, 8);
  if (name == "search_cluster8") return run([&](unsigned char* shared) { GroupSearch<8, 20, kShared>(*batch, shared).run(); }, 8);
  return 2;
}

int emulate_pack(const SearchBatch* batch, const PackedHits* to, uint32_t num_threads, uint32_t seed) {
  return simt::launch(batch->num_queries, 1, num_threads, 64, seed,
                      [&](unsigned char* shared) { pack_query(*batch, *to, shared); })
             ? 0
             : 1;
}

void emulate_root_table(const TrieView* trie, uint32_t root_last, int shift, uint32_t num_places, uint32_t* table) {
  for (uint32_t place = 0; place <= num_places; ++place) table[place] = root_table_entry(*trie, root_last, shift, place);
}

void emulate_tags(const TrieView* trie, uint32_t* tags, LineHead* heads) {
  for (uint32_t node = 0; node < trie->num_nodes; ++node) tags[node] = make_tag(*trie, node);
  for (uint32_t line = 0; line * kLineNodes < trie->num_nodes; ++line) heads[line] = make_head(*trie, line);
}

uint32_t emulate_count_children(const TrieView* trie, uint32_t fan_out) {
  uint32_t count = 0;
  for (uint32_t node = 0; node < trie->num_nodes; ++node) {
    const uint32_t children = child_range(*trie, node).fan_out();
    if (children >= fan_out) count += children;
  }
  return count;
}

void emulate_put_in_table(const TrieView* trie, const ChildTable* table, uint32_t* places) {
  simt::launch(1, 1, 32, 64, 1, [&](unsigned char*) {
    for (uint32_t node = 0; node < trie->num_nodes; ++node) {
      const ChildRange range = child_range(*trie, node);
      if (range.fan_out() >= table->fan_out) put_children(*trie, *table, places, range, simt::lane(), 32);
    }
  });
}

// Over all nodes in the table, tokens for which it finds something else than find_child.
uint32_t differences_of_table(const TrieView* trie, const uint32_t* tags, const ChildTable* table, const uint32_t* tokens, uint32_t count) {
  uint32_t different = 0;
  for (uint32_t node = 0; node < trie->num_nodes; ++node) {
    const ChildRange range = child_range(*trie, node);
    for (uint32_t i = 0; range.fan_out() >= table->fan_out && i < count; ++i)
      different += find_in_table(*table, *trie, tags, range, tokens[i]) != find_child(*trie, range, tokens[i]);
  }
  return different;
}

// Barriers of a block and of a group, and reads of 16, 8, 4 and 2 bytes and touches, since the last call.
void take_counts(uint64_t* to) {
  const simt::Counts& c = simt::counts();
  const uint64_t values[7] = {c.block_barriers, c.group_barriers, c.reads16, c.reads8, c.reads4, c.reads2, c.touches};
  memcpy(to, values, sizeof values);
  simt::counts() = simt::Counts();
}

// What the driver's C functions are to say of a stream: in Python they would swallow signals.
int stream_status = 600;
int query_stream(void*) { return stream_status; }
int synchronize_stream(void*) { return 0; }
int num_recorded = 0;
int record_event(void*, void*) { return ++num_recorded, 0; }

uint64_t search_batch_size() { return sizeof(SearchBatch); }
// Bytes of a block's shared memory: of fixed size, and the rest.
void search_sizes(const SearchBatch* batch, uint32_t num_blocks, uint32_t num_threads, uint64_t* fixed, uint64_t* large) {
  if (num_threads == 512) return sizes<1, 16>(batch, fixed, large);
  if (num_blocks == 1) return sizes<1, 20>(batch, fixed, large);
  return num_blocks == 4 ? sizes<4, 20>(batch, fixed, large) : sizes<8, 20>(batch, fixed, large);
}
}
