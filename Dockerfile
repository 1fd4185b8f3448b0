# The release environment: everything run.sh would install, ready to train.
#   docker build -t model-check .
#   docker run --gpus all --ipc=host -v "$PWD/work:/work" model-check train --preset production
FROM python:3.12-slim

# git names the commit of a run in environment.json; procps and tini keep signals and orphans in order.
RUN apt-get update \
    && apt-get install -y --no-install-recommends git procps tini gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/model-check
COPY requirements.txt pyproject.toml README.md LICENSE ./
RUN pip install --no-cache-dir -r requirements.txt
COPY model_check model_check
RUN pip install --no-cache-dir --no-deps .

WORKDIR /work
ENTRYPOINT ["tini", "-g", "--", "model-check"]
CMD ["train", "--preset", "debug"]
