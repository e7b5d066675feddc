"""Hosts the OpenAI-compatible server in Ray Serve: one address, and more replicas of the models under load.

    pip install "edge-run[ray]"
    python examples/ray_serve.py my-model --threads 4 --replicas 8

It starts Ray on this machine, or joins the cluster that RAY_ADDRESS names. See "In a cluster" in docs/server.md.
"""

import argparse
import os

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # without it, Ray reports to its makers

import ray
from ray import serve

import edgerun.server


def application(models: list[str], threads: int, replicas: int) -> serve.Application:
    """The server, with replicas of `threads` processors each. A replica loads a model when it is first asked for it."""

    def build() -> object:
        return edgerun.server.app(models, threads=threads)

    scaling = {"min_replicas": 1, "max_replicas": replicas, "target_ongoing_requests": 4, "upscale_delay_s": 10}
    deployment = serve.deployment(
        name="edge-run", ray_actor_options={"num_cpus": threads}, max_ongoing_requests=64, autoscaling_config=scaling
    )
    return deployment(serve.ingress(build)()).bind()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serve models in Ray Serve.")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--threads", type=int, default=2, help="processors of a replica")
    parser.add_argument("--replicas", type=int, default=4, help="largest number of replicas")
    options = parser.parse_args()
    ray.init(include_dashboard=False)
    serve.start(http_options={"host": "127.0.0.1", "port": options.port})
    serve.run(application(options.models, options.threads, options.replicas), blocking=True)
