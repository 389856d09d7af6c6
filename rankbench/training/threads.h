// Work divided among threads. fused_step.cpp includes this file.

#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

// Calls function(thread, number) for every number below `count`. Each thread takes the next number when it is free, so
// that what a number does must not depend on its thread. Where the system grants fewer threads, those take it all.
template <class Function>
static void divide(long threads, long count, Function function) {
    std::atomic<long> next{0};
    const auto work = [&](long thread) {
        for (long number; (number = next++) < count;) function(thread, number);
    };
    std::vector<std::thread> others;
    try {
        for (long thread = 1; thread < std::min(threads, count); thread++) others.emplace_back(work, thread);
    } catch (const std::system_error&) {
    }
    work(0);
    for (std::thread& other : others) other.join();
}
