// pinned host memory, see pool/impl.h

#include "pool/impl.h"

#include "llama-impl.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>

#ifdef __linux__
#include <sys/mman.h>
#endif

static constexpr size_t PAGE      = 4 << 10;
static constexpr size_t HUGE_PAGE = 2 << 20;

// huge pages, unless they would waste much of a small allocation
static size_t page_for(size_t size) { return size < 16 * HUGE_PAGE ? PAGE : HUGE_PAGE; }

[[noreturn]] static void no_memory(size_t size) {
    throw kvf_failure(KVF_E_MEMORY, format("%zu bytes of host memory cannot be pinned", size));
}

// all pinned allocations: first byte and size
static std::mutex                     g_mutex;
static std::map<const char *, size_t> g_places;

bool kvf_host::is_one(const void * a, const void * b) {
    const std::lock_guard<std::mutex> lock(g_mutex);

    const auto * first = std::min((const char *) a, (const char *) b);
    const auto * last  = std::max((const char *) a, (const char *) b);
    const auto   next  = g_places.upper_bound(first);
    if (next == g_places.begin()) { return false; }
    const auto & [base, size] = *std::prev(next);
    return last < base + size;
}

// The memory is first allocated in huge pages and touched. That takes minutes for a hundred GiB, but blocks no other thread.
// Pinning it afterwards is fast. If the backend cannot pin existing memory, it allocates the memory itself.
kvf_host::kvf_host(ggml_backend_dev_t dev, size_t size) : size(GGML_PAD(size, page_for(size))) {
    take(dev, size);

    const std::lock_guard<std::mutex> lock(g_mutex);
    g_places[(const char *) base] = size;
}

void kvf_host::take(ggml_backend_dev_t dev, size_t size) {
    auto *     reg = ggml_backend_dev_backend_reg(dev);
    const auto pin = (bool (*)(void *, size_t)) ggml_backend_reg_get_proc_address(reg, "kvflash_host_register");

#ifdef __linux__
    if (pin) {
        base = aligned_alloc(page_for(size), this->size);
        if (!base) { no_memory(size); }
        madvise(base, this->size, MADV_HUGEPAGE);
        for (size_t at = 0; at < this->size; at += PAGE) { // the system clears a page at the first write
            ((volatile char *) base)[at] = 0;
        }
        if (!pin(base, this->size)) {
            free(base);
            no_memory(size);
        }
        unpin = (void (*)(void *)) ggml_backend_reg_get_proc_address(reg, "kvflash_host_unregister");
        return;
    }
#else
    GGML_UNUSED(pin);
#endif

    // if pinning fails, some backends silently return plain memory
    auto * buft = ggml_backend_dev_host_buffer_type(dev);
    buf.reset(ggml_backend_buft_alloc_buffer(buft, size));
    if (!buf || ggml_backend_buffer_get_type(buf.get()) != buft) { no_memory(size); }
    base = ggml_backend_buffer_get_base(buf.get());
}

kvf_host::~kvf_host() {
    {
        const std::lock_guard<std::mutex> lock(g_mutex);
        g_places.erase((const char *) base);
    }
    if (unpin) {
        unpin(base);
        free(base);
    }
}
