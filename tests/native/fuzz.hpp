// What the drivers have in common: one source of random numbers, and checks that end the program.
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <random>

inline std::mt19937_64 source;

inline uint64_t below(uint64_t n) { return source() % n; }

#define CHECK(condition)                                              \
  do {                                                                \
    if (!(condition)) {                                               \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      exit(1);                                                        \
    }                                                                 \
  } while (0)
