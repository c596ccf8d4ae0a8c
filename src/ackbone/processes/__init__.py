"""The processes of `ackbone run`: a supervisor, and the workers that it starts and replaces.

A handler that kills its process takes one worker with it, and the supervisor starts another one.
Messages that were running in two such workers (suspects) run in child processes of a warden, so
that they cannot take other messages along.

    ackbone run MODULE:APP --workers 4                  supervisor.py
    ├── four workers                                    worker_process.py MODULE:APP
    │   └── children of isolated handlers               handler_child.py
    ├── a warden, while there are suspects              worker_process.py MODULE:APP --warden
    │   └── a launcher                                  launcher.py
    │       └── workers that run suspects, a small group or one at a time
    └── a launcher, after the first crash               launcher.py
        └── workers that replace others

`start_report.py` is what a worker tells the supervisor, `suspects.py` the warden and those who ask
for it, `load_app.py` how MODULE:APP is found.
"""
