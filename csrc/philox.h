/* Philox 4x64-10: a counter-based random generator (Salmon et al., "Parallel random numbers:
 * as easy as 1, 2, 3", SC 2011, table 2).  A coin is a pure function of (seed, index): nothing is
 * stored, so the same seed gives the same coins on every machine and any coin can be recomputed. */
#ifndef EDGESPEC_PHILOX_H
#define EDGESPEC_PHILOX_H

#include <stddef.h>
#include <stdint.h>

/* One block: ten rounds of Philox over `counter` with `key`. */
void es_philox_block(const uint64_t counter[4], const uint64_t key[2], uint64_t out[4]);

/* Writes coins `first` .. `first + n - 1` of stream `seed`: doubles in [0, 1) with 53 random bits. */
void es_coins(uint64_t seed, uint64_t first, double *coins, size_t n);

/* The coin of one position in a text, of a stream that es_coins never reads. */
double es_position_coin(uint64_t seed, uint64_t position);

#endif
