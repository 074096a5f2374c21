"""HTTP, independent of the service: limits of connections and requests, parsing of bodies, responses and errors.

address             the URL of a server, and the socket that listens on it
connections         uvicorn's protocol with bounds on connections, request heads and unread responses
connection_limits   these bounds, and how many connections a process can hold
guard               the outermost layer: checks token, Host, size and rate of the body, as each route declares
routes              routes with a JSON body: reads bodies, writes responses, cancels the work of disconnected clients
tracing             the spans of requests, if the process has a tracer
page_files          the files of the page, which load nothing from elsewhere
api_page            the page that describes the API
http_errors         exceptions as HTTP errors in OpenAI's format
"""
