"""Trained models over HTTP with OpenAI's API: ``nntask serve``.

`engine` is the single thread that owns the runtime and its running batch. `schema` reads requests, `answers` writes responses, `app` defines the
routes, and `server` is the process. The event loop and the engine's thread communicate by queues; neither blocks on the other.
"""
