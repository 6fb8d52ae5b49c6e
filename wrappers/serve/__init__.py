"""Trained models over HTTP as OpenAI's clients speak it: ``nntask serve``.

`engine` is the one thread that owns the runtime and its running batch; `schema` reads requests, `answers` writes what is said, `app` has the routes
and `server` the process. The two sides talk by queues; neither waits for the other in between.
"""
