// Runs one of paper.cu's kernels without a GPU. Arguments: kernel, blocks, groups, input, output. The input is a
// PaperBatch whose pointers are offsets into the bytes behind it; the output is those bytes after the kernel.
#include "cuda_words.hpp"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "kernels/paper.cu"

namespace {

using Kernel = void (*)(PaperBatch);

Kernel kernel_called(const std::string& name) {
  if (name == "flashtrie_paper") return flashtrie_paper;
  if (name == "linear_probe") return linear_probe;
  if (name == "two_pointer") return two_pointer;
  if (name == "per_child") return per_child;
  if (name == "hash_transitions") return hash_transitions;
  if (name == "ppt") return ppt;
  std::abort();
}

// Offsets become addresses; every pointer member is one.
template <typename T>
void place(T*& pointer, uint8_t* base) {
  pointer = reinterpret_cast<T*>(base + reinterpret_cast<uintptr_t>(pointer));
}

void place_all(PaperBatch& b, uint8_t* base) {
  place(b.trie.louds, base), place(b.trie.lines, base), place(b.trie.wide, base), place(b.trie.label_low, base);
  place(b.trie.high_flags, base), place(b.trie.high_bits, base), place(b.search.length_factors, base);
  place(b.tokens, base), place(b.logprobs, base), place(b.workspace, base), place(b.valid_tokens, base);
  place(b.valid_flags, base), place(b.valid_offsets, base), place(b.hash_keys, base), place(b.hash_children, base);
  place(b.barriers, base), place(b.phases, base), place(b.num_hits, base), place(b.num_tokens, base);
  place(b.key_ids, base), place(b.scores, base), place(b.normalised_scores, base), place(b.depths, base);
  place(b.hit_tokens, base);
}

void run_block(Kernel kernel, const PaperBatch& batch, unsigned index) {
  blockIdx.x = index;
  Block own(kPaperThreads);
  block = &own;
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < kPaperThreads; ++i)
    threads.emplace_back([&, i] {
      threadIdx.x = i;
      kernel(batch);
    });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main(int, char** arguments) {
  const unsigned num_blocks = static_cast<unsigned>(std::atoi(arguments[2]));
  FILE* input = std::fopen(arguments[4], "rb");
  std::fseek(input, 0, SEEK_END);
  const size_t size = static_cast<size_t>(std::ftell(input)) - sizeof(PaperBatch);
  std::rewind(input);
  PaperBatch batch;
  auto* memory = static_cast<uint8_t*>(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  if (std::fread(&batch, sizeof batch, 1, input) != 1 || std::fread(memory, 1, size, input) != size) return 1;
  place_all(batch, memory);
  gridDim.x = num_blocks, blockDim.x = kPaperThreads;
  if (std::string(arguments[1]) == "hash_transitions") {  // built by one block of one warp
    blockDim.x = 32, gridDim.x = 1;
    for (unsigned i = 0; i < 32; ++i) {
      threadIdx.x = i;
      build_transitions(batch.trie, const_cast<uint64_t*>(batch.hash_keys), const_cast<uint32_t*>(batch.hash_children),
                        batch.log2_hash);
    }
  }
  const Kernel kernel = kernel_called(arguments[1]);
  for (unsigned index = 0; index < num_blocks; ++index) {
    if (fork() == 0) {
      run_block(kernel, batch, index);
      _exit(0);
    }
  }
  for (int status; wait(&status) > 0;)
    if (status != 0) return 2;
  FILE* output = std::fopen(arguments[5], "wb");
  const bool wrote = std::fwrite(memory, 1, size, output) == size;
  return std::fclose(output) == 0 && wrote ? 0 : 3;
}
