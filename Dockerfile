# kvflash in a container, see CONTRIBUTING.md:
#   docker build -t kvflash .
#   docker build -t kvflash:cuda --build-arg VARIANT=cuda .
ARG VARIANT=cpu

FROM python:3.12-slim-bookworm AS cpu
FROM nvidia/cuda:13.0.2-runtime-ubuntu24.04 AS cuda
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*

# each makes one wheel in dist/, for any processor of the kind
FROM python:3.12-slim-bookworm AS cpu-wheel
RUN apt-get update && apt-get install -y --no-install-recommends g++ make
WORKDIR /src
COPY . .
RUN make wheel

FROM nvidia/cuda:13.0.2-devel-ubuntu24.04 AS cuda-wheel
RUN apt-get update && apt-get install -y --no-install-recommends g++ make python3 python3-dev python3-venv
WORKDIR /src
COPY . .
RUN make wheel-cuda

# FROM knows build arguments; --mount does not
FROM ${VARIANT}-wheel AS wheel

FROM ${VARIANT}
RUN python3 -m venv /opt/kvflash
RUN --mount=type=bind,from=wheel,source=/src/dist,target=/dist \
    /opt/kvflash/bin/python -m pip install --no-cache-dir --disable-pip-version-check /dist/*.whl
ENV PATH=/opt/kvflash/bin:$PATH
# the cache has what -hf downloads, and the prefix cache: a volume of its own, since a folder of the host may not be writable
RUN useradd --create-home --uid 10001 kvflash \
    && install -d -o kvflash /models /home/kvflash/.cache
# a number, so that a cluster can see that it is not root
USER 10001
WORKDIR /models
VOLUME ["/models", "/home/kvflash/.cache"]
# 127.0.0.1 of a container cannot be reached from outside
ENV LLAMA_ARG_HOST=0.0.0.0
EXPOSE 8080
HEALTHCHECK --interval=30s --start-period=5m \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f\"http://127.0.0.1:{os.environ.get('LLAMA_ARG_PORT', 8080)}/health\")"]
ENTRYPOINT ["kvflash"]
CMD ["--help"]
