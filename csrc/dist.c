/* Distributions: made, read, sampled, and taken from each other. */
#include "sampler.h"

#include <float.h>
#include <math.h>

es_status es_dist_set_point(es_sampler *s, int32_t token, es_dist *out) {
    if (token < 0 || (size_t)token >= s->n_vocab) return ES_BAD_LENGTH;
    out->dense = false;
    out->n = 1;
    out->ids[0] = token;
    out->probs[0] = 1.0f;
    out->total = 1.0;
    return ES_OK;
}

es_status es_dist_set(es_sampler *s, const float *probs, size_t n, es_dist *out) {
    if (n == 0 || n > s->n_vocab) return ES_BAD_LENGTH;
    double total = 0;
    out->dense = true;
    out->n = n;
    out->total = 0; /* stays so when a probability is refused */
    for (size_t b = 0; b < es_n_blocks(n); b++) {
        out->block_sum[b] = 0;
        for (size_t i = b * ES_BLOCK_LEN; i < n && i < (b + 1) * ES_BLOCK_LEN; i++) {
            if (!(probs[i] >= 0.0f && probs[i] <= 1.0f)) return ES_NOT_FINITE;
            out->probs[i] = probs[i];
            out->block_sum[b] += (double)probs[i];
        }
        total += out->block_sum[b];
    }
    out->total = total;
    return total > 0 ? ES_OK : ES_NO_TOKEN;
}

es_status es_dist_without(const es_sampler *s, const es_dist *q, int32_t token, es_dist *out) {
    if (token < 0 || (size_t)token >= s->n_vocab) return ES_BAD_LENGTH;
    double left = 0; /* summed, not subtracted: little may be left of much */
    if (!q->dense) {
        for (size_t i = 0; i < q->n; i++)
            if (q->ids[i] != token) left += (double)q->probs[i];
        if (!(left >= FLT_MIN)) return ES_NO_TOKEN;
        size_t kept = 0;
        double total = 0;
        for (size_t i = 0; i < q->n; i++) {
            if (q->ids[i] == token) continue;
            out->ids[kept] = q->ids[i];
            out->probs[kept] = (float)((double)q->probs[i] / left);
            total += (double)out->probs[kept++];
        }
        out->dense = false;
        out->n = kept;
        out->total = total;
        return ES_OK;
    }
    const size_t n_blocks = es_n_blocks(q->n), its_block = (size_t)token / ES_BLOCK_LEN;
    double its_sum = 0;
    for (size_t i = its_block * ES_BLOCK_LEN; i < q->n && i < (its_block + 1) * ES_BLOCK_LEN; i++)
        if (i != (size_t)token) its_sum += (double)q->probs[i];
    for (size_t b = 0; b < n_blocks; b++) left += b == its_block ? its_sum : q->block_sum[b];
    if (!(left >= FLT_MIN)) return ES_NO_TOKEN;
    const double scale = 1.0 / left;
    for (size_t i = 0; i < q->n; i++)
        out->probs[i] = i == (size_t)token ? 0.0f : (float)((double)q->probs[i] * scale);
    out->dense = true;
    out->n = q->n;
    out->total = 0;
    for (size_t b = 0; b < n_blocks; b++)
        out->total += out->block_sum[b] = (b == its_block ? its_sum : q->block_sum[b]) * scale;
    return ES_OK;
}

double es_dist_prob(const es_dist *d, int32_t token) {
    if (token < 0) return 0.0;
    if (d->dense) return (size_t)token < d->n ? (double)d->probs[token] : 0.0;
    for (size_t i = 0; i < d->n; i++)
        if (d->ids[i] == token) return (double)d->probs[i];
    return 0.0;
}

int32_t es_dist_top(const es_dist *d) {
    size_t best = 0;
    for (size_t i = 1; i < d->n; i++)
        if (d->probs[i] > d->probs[best] || (d->probs[i] == d->probs[best] && !d->dense && d->ids[i] < d->ids[best]))
            best = i;
    return d->dense ? (int32_t)best : d->ids[best];
}

int32_t es_dist_sample(const es_dist *d, double coin) {
    const double goal = coin * d->total;
    double sum = 0;
    size_t i = 0;
    if (d->dense)
        for (size_t b = 0; i + ES_BLOCK_LEN < d->n && sum + d->block_sum[b] <= goal; b++, i += ES_BLOCK_LEN)
            sum += d->block_sum[b];
    size_t last = i;
    for (; i < d->n; i++) {
        sum += (double)d->probs[i];
        if (d->probs[i] > 0.0f) {
            last = i;
            if (sum > goal) break;
        }
    }
    /* Rounding may leave the sum just below the goal: then the last possible token is the one.
     * Blocks skipped above may hold it. */
    while (last > 0 && d->probs[last] == 0.0f) last--;
    return d->dense ? (int32_t)last : d->ids[last];
}

double es_residual(es_sampler *s, es_dist *p, const es_dist *q, double weight) {
    /* q by token id: in place when it is dense and as long as p, else scattered over zeros. */
    const float *q_by_id = q->probs;
    const bool scatter = !q->dense || (p->dense && q->n < p->n);
    if (scatter) {
        for (size_t i = 0; i < q->n; i++) s->scattered[q->dense ? (int32_t)i : q->ids[i]] = q->probs[i];
        q_by_id = s->scattered;
    }
    float *excess = s->adjusted;
    double *block_sum = s->spare_sums, total = 0;
    if (p->dense) {
        total = s->rows->residual(p->probs, q_by_id, p->n, (float)fmin(weight, FLT_MAX), excess, block_sum);
    } else {
        for (size_t i = 0; i < p->n; i++) {
            const int32_t id = p->ids[i];
            const float q_i = scatter || (size_t)id < q->n ? q_by_id[id] : 0.0f;
            const float x = (float)(weight * (double)p->probs[i] - (double)q_i);
            excess[i] = x > 0.0f ? x : 0.0f;
            total += (double)excess[i];
        }
    }
    if (scatter)
        for (size_t i = 0; i < q->n; i++) s->scattered[q->dense ? (int32_t)i : q->ids[i]] = 0.0f;
    if (!(total > 0.0)) return 0.0;
    s->adjusted = p->probs;
    s->spare_sums = p->block_sum;
    p->probs = excess;
    p->block_sum = block_sum;
    p->total = total;
    return total;
}
