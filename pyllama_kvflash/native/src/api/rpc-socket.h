#pragma once

// Socket options of an RPC client (patch 0009). Include this after the system's socket headers.

#ifndef _WIN32
#include <sys/time.h>
#endif

// seconds until a server counts as lost: without its first answer, and without any sign of its machine
static constexpr int KVF_SECONDS_TO_ANSWER  = 10;
static constexpr int KVF_SECONDS_TO_BE_GONE = 60;

template <typename fd_t> static void kvf_set_option(fd_t fd, int level, int name, int value) {
    setsockopt(fd, level, name, (const char *) &value, sizeof(value));
}

template <typename fd_t> static void kvf_set_time_to_answer(fd_t fd, int seconds) {
#ifdef _WIN32
    kvf_set_option(fd, SOL_SOCKET, SO_RCVTIMEO, seconds * 1000);
#else
    const timeval value = {seconds, 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &value, sizeof(value));
#endif
}

// before the connection: the first answer must come soon
template <typename fd_t> static void kvf_expect_answer(fd_t fd) {
    kvf_set_time_to_answer(fd, KVF_SECONDS_TO_ANSWER);
#ifdef TCP_USER_TIMEOUT
    kvf_set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, KVF_SECONDS_TO_ANSWER * 1000);
#endif
}

// after the connection: a computation may take long, but the other machine still acknowledges data
template <typename fd_t> static void kvf_be_patient(fd_t fd) {
    kvf_set_time_to_answer(fd, 0);
    kvf_set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
#ifdef TCP_USER_TIMEOUT
    kvf_set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, KVF_SECONDS_TO_BE_GONE / 4);
    kvf_set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, KVF_SECONDS_TO_BE_GONE / 4);
    kvf_set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, KVF_SECONDS_TO_BE_GONE * 1000);
#endif
}

template <typename fd_t> static void kvf_shutdown(fd_t fd) {
#ifdef _WIN32
    ::shutdown(fd, SD_BOTH);
#else
    ::shutdown(fd, SHUT_RDWR);
#endif
}
