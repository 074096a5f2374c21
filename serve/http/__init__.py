"""HTTP: what bounds a request and converts it, independent of what answers it.

connections   uvicorn's protocol with bounds on connections, request heads and unread responses
limits        these bounds, and how many connections a process can hold
guard         the first layer of every request: tokens, Host, size and rate of the body
routes        routes with a JSON body: reading bodies, writing responses, clients that have gone
errors        exceptions as HTTP errors in OpenAI's format
"""
