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
from ray.serve.config import RequestRouterConfig

import edgerun.server


def application(models: list[str], threads: int, replicas: tuple[int, int], parallel: int) -> serve.Application:
    """The server, with replicas of `threads` processors each, which generate `parallel` answers at a time.

    A replica loads a model when it is first asked for it. Ray keeps the requests for which no replica has a place.
    Requests with the same header `x-session-id` go to one replica, which has the beginning of the conversation in its
    prefix cache, or to another one while that replica has no place.
    """

    def build() -> object:
        return edgerun.server.app(models, threads=threads, parallel=parallel)

    scaling = {
        "min_replicas": replicas[0],
        "max_replicas": replicas[1],
        "target_ongoing_requests": parallel,
        "upscale_delay_s": 10,
    }
    routing = RequestRouterConfig(
        request_router_class="ray.serve.experimental.consistent_hash_router.ConsistentHashRouter",
        request_router_kwargs={"num_fallback_replicas": replicas[1] - 1},
    )
    deployment = serve.deployment(
        name="edge-run",
        ray_actor_options={"num_cpus": threads},
        max_ongoing_requests=parallel,
        autoscaling_config=scaling,
        request_router_config=routing,
    )
    return deployment(serve.ingress(build)()).bind()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serve models in Ray Serve.")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--threads", type=int, default=2, help="processors of a replica")
    parser.add_argument("--replicas", type=int, default=4, help="largest number of replicas")
    parser.add_argument("--min-replicas", type=int, default=1, help="smallest number of replicas")
    parser.add_argument("--parallel", type=int, default=4, help="answers that a replica generates at a time")
    options = parser.parse_args()
    ray.init(include_dashboard=False)
    serve.start(http_options={"host": "127.0.0.1", "port": options.port})
    replicas = (options.min_replicas, options.replicas)
    serve.run(application(options.models, options.threads, replicas, options.parallel), blocking=True)
