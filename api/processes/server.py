"""`python -m api.processes.server LISTENING LINK`: one of several processes that serve the API.

Its master starts it with the descriptors of two sockets: one to accept on, one to the master.
"""

import socket
import sys

from api.processes.link import MasterLink, report_failure
from infra.log import configure_log
from infra.settings import Settings, read_settings


def main() -> None:
    listening, connection = (socket.socket(fileno=int(word)) for word in sys.argv[1:3])
    try:
        settings = read_settings(Settings)
        configure_log(settings.log_level)
        # Here, so that the master learns why it cannot be imported.
        from api.app import load_app
        from api.http.server import make_server, run_server

        link = MasterLink(connection, settings.api_processes)
        server = make_server(settings, load_app(settings, link))
    except BaseException as error:
        report_failure(connection, error)
        raise
    run_server(server, listening)


if __name__ == "__main__":
    main()
