//! The configuration file as an operator upgrades it.

use super::store::threadkeep;

/// The program keeps its own files private by its umask, which must not count for a file that others read.
#[cfg(unix)]
#[test]
fn a_configuration_keeps_its_permissions_when_it_is_upgraded() {
    use std::os::unix::fs::PermissionsExt as _;
    for mode in [0o644, 0o660, 0o600] {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.yaml");
        std::fs::write(&file, "config_version: 26\n").unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
        let said = threadkeep(&["config", "upgrade", "--config", &file.display().to_string()]);
        assert_eq!(said.code, 0, "{said:?}");
        for file in [file.clone(), dir.path().join("config.yaml.bak")] {
            let kept = std::fs::metadata(&file).unwrap().permissions().mode() & 0o7777;
            assert_eq!(kept, mode, "{}: {kept:o}", file.display());
        }
        assert!(std::fs::read_to_string(&file).unwrap().contains("database:"), "it was upgraded");
    }
}
