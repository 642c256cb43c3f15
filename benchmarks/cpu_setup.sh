# Prepares a machine where nothing of polyattn is installed for the native CPU kernels: source it from the repository's
# root. An entry point makes the plugin known; its sources are used where they lie. Builds the library
# where it isn't built of these sources.
root=$PWD
info=$(mktemp -d)
mkdir -p "$info/polyattn_cpu-0.1.0.dist-info"
printf 'Metadata-Version: 2.1\nName: polyattn-cpu\nVersion: 0.1.0\n' > "$info/polyattn_cpu-0.1.0.dist-info/METADATA"
printf '[polyattn.plugins]\ncpu = polyattn_cpu.hooks\n[pytest11]\npolyattn-conformance = polyattn.conformance.plugin\n' > "$info/polyattn_cpu-0.1.0.dist-info/entry_points.txt"
export PYTHONPATH=$root/core/src:$root/plugins/cpu/src:$info${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1 CUDA_VISIBLE_DEVICES= POLYATTN_PLUGINS=cpu
python3 -c 'from polyattn_cpu.native import build; raise SystemExit(not build.build_or_say())' || exit
