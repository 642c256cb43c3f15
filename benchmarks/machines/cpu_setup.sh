# Prepares a machine where nothing of polyattn is installed for the native CPU kernels: source it from the repository's
# root. Builds the library where it isn't built of these sources.
PLUGINS=cpu
. benchmarks/machines/sources.sh
export CUDA_VISIBLE_DEVICES= POLYATTN_PLUGINS=cpu
python3 -c 'from polyattn_cpu.native import build; raise SystemExit(not build.build_or_say())' || exit
