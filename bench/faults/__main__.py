import sys

from bench.faults.planted import main

sys.exit(main())
