// eigenvectors of small symmetric matrices: Householder's reduction, then QL with implicit shifts (EISPACK's tred2 and
// tql2). A library would use threads of its own for each, which wait for each other where the cores have other work

#include "kvflash-fresh.h"
#include "kvflash-lanes.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

static constexpr uint32_t MOST_SHIFTS = 60; // of a value. some 2 are usual

KVF_CLONES
static double dot(const double * a, const double * b, uint32_t n) {
    double   sums[8] = {};
    uint32_t i       = 0;
    for (; i + 8 <= n; i += 8) {
        for (uint32_t j = 0; j < 8; ++j) {
            sums[j] += a[i + j] * b[i + j];
        }
    }
    for (; i < n; ++i) {
        sums[i % 8] += a[i] * b[i];
    }
    return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

// y += a*x
KVF_CLONES
static void add_scaled(double * y, double a, const double * x, uint32_t n) {
    for (uint32_t i = 0; i < n; ++i) {
        y[i] += a * x[i];
    }
}

KVF_CLONES
static void rotate(double * a, double * b, double c, double s, uint32_t n) {
    for (uint32_t i = 0; i < n; ++i) {
        const double x = a[i], y = b[i];
        a[i] = c * x - s * y;
        b[i] = s * x + c * y;
    }
}

// v: [n][n], columns first. Returns its diagonal d and the e beside it, and in v what led there
static void reduce(double * v, double * d, double * e, uint32_t n) {
    const auto col = [&](uint32_t j) { return v + (size_t) j * n; };
    for (uint32_t j = 0; j < n; ++j) {
        d[j] = col(j)[n - 1];
    }
    for (uint32_t i = n - 1; i > 0; --i) {
        const double scale = std::accumulate(d, d + i, 0.0, [](double sum, double x) { return sum + fabs(x); });
        double       h     = 0;
        if (scale == 0) {
            e[i] = d[i - 1];
            for (uint32_t j = 0; j < i; ++j) {
                d[j]      = col(j)[i - 1];
                col(j)[i] = col(i)[j] = 0;
            }
            d[i] = 0;
            continue;
        }
        for (uint32_t k = 0; k < i; ++k) {
            d[k] /= scale;
        }
        h              = dot(d, d, i);
        const double f = d[i - 1], g = f > 0 ? -sqrt(h) : sqrt(h);
        e[i] = scale * g;
        h -= f * g;
        d[i - 1] = f - g;
        std::fill_n(e, i, 0.0);
        for (uint32_t j = 0; j < i; ++j) { // e = v*d, of which only the lower half is there
            const uint32_t n_below = i - j - 1;
            col(i)[j]              = d[j];
            e[j] += col(j)[j] * d[j] + dot(col(j) + j + 1, d + j + 1, n_below);
            add_scaled(e + j + 1, d[j], col(j) + j + 1, n_below);
        }
        for (uint32_t j = 0; j < i; ++j) {
            e[j] /= h;
        }
        add_scaled(e, -dot(e, d, i) / (h + h), d, i);
        for (uint32_t j = 0; j < i; ++j) {
            add_scaled(col(j) + j, -d[j], e + j, i - j);
            add_scaled(col(j) + j, -e[j], d + j, i - j);
        }
        for (uint32_t j = 0; j < i; ++j) {
            d[j]      = col(j)[i - 1];
            col(j)[i] = 0;
        }
        d[i] = h;
    }
    for (uint32_t i = 0; i + 1 < n; ++i) {
        col(i)[n - 1] = col(i)[i];
        col(i)[i]     = 1;
        double * next = col(i + 1);
        if (d[i + 1] != 0) {
            for (uint32_t j = 0; j <= i; ++j) {
                add_scaled(col(j), -dot(next, col(j), i + 1) / d[i + 1], next, i + 1);
            }
        }
        std::fill_n(next, i + 1, 0.0);
    }
    for (uint32_t j = 0; j < n; ++j) {
        d[j]          = col(j)[n - 1];
        col(j)[n - 1] = 0;
    }
    col(n - 1)[n - 1] = 1;
    e[0]              = 0;
}

// d, e, v: of reduce(). Returns the values in d, and the vectors in v
static void iterate(double * v, double * d, double * e, uint32_t n) {
    constexpr double EPSILON = std::numeric_limits<double>::epsilon();

    std::copy(e + 1, e + n, e);
    e[n - 1]     = 0;
    double shift = 0, top = 0;
    for (uint32_t l = 0; l < n; ++l) {
        top        = std::max(top, fabs(d[l]) + fabs(e[l]));
        uint32_t m = l;
        while (m + 1 < n && fabs(e[m]) > EPSILON * top) {
            ++m;
        }
        for (uint32_t i_shift = 0; m > l && i_shift < MOST_SHIFTS && fabs(e[l]) > EPSILON * top; ++i_shift) {
            const double g = d[l], p0 = (d[l + 1] - g) / (2 * e[l]), r0 = std::copysign(hypot(p0, 1), p0);
            d[l]              = e[l] / (p0 + r0);
            d[l + 1]          = e[l] * (p0 + r0);
            const double next = d[l + 1], h = g - d[l], beside = e[l + 1];
            for (uint32_t i = l + 2; i < n; ++i) {
                d[i] -= h;
            }
            shift += h;
            double p = d[m], c = 1, c2 = 1, c3 = 1, s = 0, s2 = 0;
            for (uint32_t i = m; i-- > l;) {
                c3             = c2;
                c2             = c;
                s2             = s;
                const double x = c * e[i], y = c * p, r = hypot(p, e[i]);
                e[i + 1] = s * r;
                s        = e[i] / r;
                c        = p / r;
                p        = c * d[i] - s * x;
                d[i + 1] = y + s * (c * x + s * d[i]);
                rotate(v + (size_t) i * n, v + (size_t) (i + 1) * n, c, s, n);
            }
            p    = -s * s2 * c3 * beside * e[l] / next;
            e[l] = s * p;
            d[l] = c * p;
        }
        d[l] += shift;
        e[l] = 0;
    }
}

void kvf_principal(uint32_t n, const float * cov, float * variances, float * components) {
    std::vector<double> v(cov, cov + (size_t) n * n), d(n), e(n);
    if (!std::all_of(v.begin(), v.end(), [](double x) { return std::isfinite(x); })) {
        throw kvf_not_finite("the model's keys");
    }
    reduce(v.data(), d.data(), e.data(), n);
    iterate(v.data(), d.data(), e.data(), n);

    std::vector<uint32_t> order(n);
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return d[a] != d[b] ? d[a] > d[b] : a < b; });
    for (uint32_t i = 0; i < n; ++i) {
        variances[i] = std::max(0.0, d[order[i]]);
        std::copy_n(v.begin() + (size_t) order[i] * n, n, components + (size_t) i * n);
    }
}
